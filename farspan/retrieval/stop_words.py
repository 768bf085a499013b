"""Words that carry grammar rather than meaning, by language: a query is searched without them.

bm25s has lists of fourteen languages. Those of others were written for farspan: articles, pronouns,
prepositions, conjunctions, auxiliary verbs, question words.
"""

from __future__ import annotations

import functools
import warnings

#: The lists of bm25s by their language; Norwegian has three codes.
_LISTED = {
    "da": "DANISH",
    "de": "GERMAN",
    "en": "EN_PLUS",
    "es": "SPANISH",
    "fr": "FRENCH",
    "it": "ITALIAN",
    "ko": "KOREAN",
    "nb": "NORWEGIAN",
    "nl": "DUTCH",
    "nn": "NORWEGIAN",
    "no": "NORWEGIAN",
    "pt": "PORTUGUESE",
    "ru": "RUSSIAN",
    "sv": "SWEDISH",
    "tr": "TURKISH",
    "zh": "CHINESE",
}
#: Rests of `didn't` and the like in bm25s' English list, which are names of languages and more.
_NOT_ENGLISH = {"d", "m", "o", "s", "t", "y", "ma"}
_WRITTEN = {
    "ar": "في من على إلى عن مع هذا هذه ذلك تلك التي الذي الذين هو هي هم أنا أنت نحن كان كانت يكون "
    "تكون و أو ثم لا ما لم لن قد هل كيف متى أين لماذا ماذا كل بعض بين عند إذا أن إن كما بعد قبل حتى "
    "أي به بها له لها فيه فيها منه منها عليه عليها كنت يمكن",
    "cs": "a aby ale ani ano být byl byla bylo byly co do i jak jako je jejich jeho její jen jsem "
    "jsme jsou já k když kde kdo kdy která které který kterou ma má mezi mi my na nad nebo není než "
    "o od on ona oni po pod pro proč před přes při s se si svůj ta tak také tam ten ti to toho tom "
    "tu ty u už v ve však za z ze že",
    "el": "ο η το οι τα του της των τον την στο στη στην στον στα στις στους και κι ή να δεν δε μη "
    "μην θα με σε από για ως προς κατά μετά παρά αντί εγώ εσύ αυτός αυτή αυτό αυτοί αυτά εμείς εσείς "
    "μου σου μας σας τους τις είναι ήταν είμαι έχει έχω έχουν που πού πως πώς πότε γιατί τι ποιος "
    "ποια ποιο ποιοι όταν όπως όπου αν αλλά όμως ένας μια μία ένα κάθε πολύ πιο μπορώ μπορεί",
    "fa": "و در به از که این آن را با برای است بود شد می تا بر هم یا نیز هر اگر اما ما من تو او شما "
    "آنها چه چرا چگونه کجا کی چیست چطور یک خود باید شود کرد کند دارد دارند های ها ای بین پس نه بی",
    "fi": "ja tai mutta että jos kun niin kuin sekä eikä vaan joka jotka jonka jossa mikä mitä missä "
    "mistä mihin milloin miten miksi kuka kenen ketä on ole olen olet olemme olette ovat oli olivat "
    "ollut olla ei en et emme ette eivät minä sinä hän me te he se ne tämä tuo nämä nuo sen sitä "
    "siitä siinä siihen tämän tässä minun sinun hänen myös vain jo vielä ennen jälkeen kanssa voi "
    "voin voiko",
    "he": "של על את עם לא הוא היא הם הן אני אתה אנחנו זה זו זאת אלה אשר כי אם או גם רק כל יש אין היה "
    "היתה היו מה מי איך איפה מתי למה כמו בין אל מן עד אך אבל כדי לי לו לה להם בו בה",
    "hi": "का की के में से को पर और है हैं था थे थी हो होता होती होते यह वह ये वे इस उस इन उन ने "
    "भी ही तो कि जो जब तक या एक मैं हम तुम आप वो मेरा मेरी आपका अपने अपना अपनी कर करना करते करने "
    "किया गया गई लिए साथ क्या क्यों कैसे कहाँ कहां कब कौन कितना नहीं न सकता सकते सकती",
    "hu": "a az egy és vagy de hogy ha mint is nem ne csak már még ez az ezt azt ennek annak ezek "
    "azok én te ő mi ti ők van vannak volt voltak lesz lehet kell aki ami amely amelyek mi mit ki "
    "hol mikor miért hogyan milyen melyik között után előtt alatt fölött által szerint meg el be",
    "id": "yang dan di ke dari untuk pada dengan adalah ini itu tidak atau dalam akan juga oleh "
    "sebagai saya kamu anda dia kami kita mereka ada bisa dapat sudah belum apa siapa bagaimana "
    "kapan mengapa kenapa mana jika karena agar seperti para",
    "ja": "です ます でした ました ません する した して います いる ある あり こと もの ため から まで "
    "より ので のに には では とは への など どの どこ なに 何が 何を どう いつ なぜ だれ それ これ あれ "
    "その この あの という",
    "pl": "a aby albo ale ani bo by był była było były być co czy dla do gdy gdzie i ich jak jako "
    "jego jej jest jestem jeśli już kiedy kto która które który ma mnie może my na nad nie niż o od "
    "on ona one oni oraz po pod przed przez przy są się ta tak także tam te tego tej ten to tu ty u "
    "w we więc wszystko z za ze że dlaczego jaki jaka jakie",
    "ro": "a al ale am ar are au ca care ce cel cea cei cele cu cum când da dacă de deci din după "
    "ea ei el ele este eu fi fost în între la le lor mai mea meu nu o pe pentru prin sau se și "
    "sunt să te tu un unde una unei unui voi noi",
    "uk": "і й та а але або чи що як це цей ця ці той та ті у в на з із зі до від по за про для при "
    "під над між через не ні так є був була було були бути він вона воно вони я ти ми ви його її їх "
    "який яка яке які де коли чому хто б би же вже ще тільки якщо",
}


@functools.cache
def stop_words(language: str) -> frozenset[str]:
    """Return the stop words of a language (ISO 639-1); none for one without a list."""
    if language not in _LISTED:
        return frozenset(_WRITTEN.get(language, "").split())
    with warnings.catch_warnings():
        # In a notebook that lacks its widgets tqdm, which bm25s imports, complains.
        warnings.simplefilter("ignore")
        from bm25s import stopwords
    listed = frozenset(getattr(stopwords, f"STOPWORDS_{_LISTED[language]}"))
    return listed - _NOT_ENGLISH if language == "en" else listed
