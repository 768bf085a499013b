"""What the field calls things that farspan calls otherwise: names that people type, as data.

Each row has words, in their normal form (`suggest.normal_form`: lower case, without separators),
and what they mean here. Of the meanings those count that can stand where the word was typed. A word
may stand in several rows.
"""

from __future__ import annotations

from typing import NamedTuple

Rows = tuple[tuple[str, tuple[str, ...]], ...]

#: Keys of run.yaml, of cluster, lab and matrix files, by a key's last parts: the names of PyTorch,
#: Hugging Face, Megatron, DeepSpeed and nanoGPT among them.
KEY_SYNONYMS: Rows = (
    # What to learn from.
    ("dataset corpus text texts input inputdir datadir datapath source documents", ("data",)),
    ("dataset corpus path folder dir", ("data.source",)),
    ("valsplit validationsplit valfraction testsize evalsplit validation", ("data.val",)),
    ("deduplicate deduplication", ("dedup",)),
    ("vocabsize nvocab", ("vocab",)),
    # The model.
    ("arch architecture modeltype", ("family",)),
    ("pretrained checkpoint modelpath modelnameorpath hfmodel", ("model.path",)),
    ("numlayers nlayer nlayers numhiddenlayers depth", ("layers",)),
    ("hiddensize nembd dim dmodel width embeddingdim modeldim hidden", ("d_model",)),
    ("numheads nhead nheads numattentionheads attentionheads", ("heads",)),
    ("numkeyvalueheads nkvheads numkvheads nkvhead querygroups", ("kv_heads",)),
    ("intermediatesize ffndim ffnhiddensize dff mlpdim nff ninner", ("d_ff",)),
    (
        "seqlen seqlength sequencelength blocksize contextlength contextsize contextwindow ctx "
        "maxlength maxlen maxseqlen maxseqlength maxpositionembeddings nctx npositions",
        ("context",),
    ),
    ("nparams numparams parameters numparameters modelsize", ("params",)),
    ("tieembeddings tiewordembeddings tieweights weighttying", ("tied",)),
    # Training.
    ("lorarank lorar peft adapter adapters qlora loraconfig", ("lora",)),
    ("loraalpha", ("alpha",)),
    ("maxsteps numsteps nsteps iterations iters maxiters trainiters numiterations", ("steps",)),
    ("numepochs numtrainepochs maxepochs nepochs", ("epochs",)),
    ("maxtokens numtokens ntokens traintokens", ("train.tokens",)),
    ("batchsize bs", ("batch.global", "batch.per_device")),
    (
        "globalbatchsize gbs trainbatchsize totalbatchsize gradientaccumulation gradaccum "
        "gradientaccumulationsteps accumulationsteps accumulategradbatches",
        ("batch.global",),
    ),
    (
        "microbatchsize mbs microbatch perdevicebatchsize perdevicetrainbatchsize "
        "localbatchsize devicebatchsize trainmicrobatchsizepergpu perdevice",
        ("batch.per_device",),
    ),
    ("learningrate maxlr peaklr baselr initiallr", ("lr",)),
    ("minlr lrmin minimumlr finallr mindecaylr", ("floor",)),
    ("wd l2 decay", ("weight_decay",)),
    ("betas", ("beta1", "beta2")),
    ("adambeta1 momentum b1", ("beta1",)),
    ("adambeta2 b2", ("beta2",)),
    (
        "gradclip gradientclip clipgrad maxgradnorm gradclipnorm gradientclipping gradnorm "
        "gradientclipval clipnorm clipgradnorm",
        ("clip",),
    ),
    ("optim optimizername optimizertype optimname", ("optimizer.kind",)),
    (
        "scheduler lrscheduler lrschedule lrschedulertype schedulertype lrdecaystyle decaystyle",
        ("schedule",),
    ),
    ("warmupsteps warmupiters warmupratio numwarmupsteps lrwarmup", ("warmup",)),
    ("ema emadecay averaging", ("average",)),
    ("dtype mixedprecision amp fp16 bf16 tf32 fp32 fp8 half autocast", ("train.precision",)),
    ("attn attnimplementation flashattention flash useflash flashattn", ("attention",)),
    (
        "gradientcheckpointing gradcheckpointing activationcheckpointing "
        "activationcheckpoint recomputegranularity recomputation checkpointing",
        ("recompute",),
    ),
    ("torchcompile usecompile", ("compile",)),
    ("randomseed manualseed", ("seed",)),
    ("evalinterval evalsteps evalevery validateinterval valinterval", ("validate_every",)),
    ("earlystopping earlystoppingpatience", ("patience",)),
    ("attentiondropout hiddendropout dropoutrate pdrop", ("dropout",)),
    ("shuffle shuffledata", ("reshuffle",)),
    # Where and how it runs.
    (
        "strategy parallelism method algorithm distributed ddp fsdp hsdp zero zerostage dp tp pp "
        "tensorparallel pipelineparallel dataparallel tensormodelparallelsize "
        "pipelinemodelparallelsize tensorparallelsize pipelineparallelsize dataparallelsize "
        "tpsize ppsize dpsize sharding fullshard diloco",
        ("parallel.technique",),
    ),
    ("techniques strategies", ("allow",)),
    ("goal optimizefor", ("objective",)),
    (
        "gpus ngpus numgpus ngpu nprocpernode numprocesses worldsize numworkers processes "
        "ndevices numdevices accelerators",
        ("parallel.workers",),
    ),
    ("backend accelerator hardware", ("parallel.device",)),
    ("hosts nodes machines hostfile", ("parallel.cluster",)),
    (
        "saveinterval savesteps saveevery checkpointinterval checkpointevery ckptinterval",
        ("every",),
    ),
    ("keeplast savetotallimit maxcheckpoints", ("keep",)),
    (
        "time maxtime timelimit walltime hours minutes duration traintime timebudget",
        ("budget.time",),
    ),
    ("cost dollars maxcost maxusd price usdbudget money", ("budget.usd",)),
    ("hourlyprice priceperhour costperhour", ("usd_per_hour",)),
    ("vectorstore vectordb vectordatabase db database", ("index.store",)),
    ("runname experiment projectname", ("name",)),
    # Machines and links.
    ("latency delay ping roundtrip roundtriptime rttms latencyms", ("rtt", "lan_rtt")),
    ("lanlatency landelay", ("lan_rtt",)),
    ("bw speed throughput rate bandwidthgbps linkspeed capacity", ("bandwidth",)),
    ("lanbandwidth lanspeed lanrate", ("lan",)),
    ("nicspeed networkcard nicrate", ("nic",)),
    ("jitterms variance", ("jitter",)),
    ("packetloss lossrate droprate drop", ("loss",)),
    ("endpoints sites ends pair from to", ("between",)),
    ("gpus gpu accelerators accelerator cards ngpus numgpus", ("devices",)),
    ("type model gpumodel gputype devicetype name", ("kind",)),
    ("num n number quantity amount", ("count",)),
    ("mem vram ram gpumemory memorygb hbm memorysize", ("memory",)),
    ("cpu cores ncpus vcpus vcpu numcpus", ("cpus",)),
    ("tflops peakflops flopspersecond", ("flops",)),
    ("memorybandwidth hbmbandwidth", ("bandwidth",)),
    ("power tdp wattage", ("watts",)),
    ("usd cost usdperhour dollars hourlyprice priceperhour costperhour", ("price",)),
    ("machines nodes servers computers hostnames", ("hosts",)),
    ("regions region zones zone datacenters locations clusters", ("sites",)),
    ("connections edges network networks wan link", ("links",)),
    ("ip ipaddress host hostname addr", ("address",)),
    ("iface nicname networkinterface", ("interface",)),
    ("ssh command shell login", ("enter",)),
    ("interpreter pythonpath venv", ("python",)),
    ("timelimit walltime maxtime until", ("lease",)),
    ("egresscost egressprice", ("egress",)),
    ("nvlink pcie", ("interconnect",)),
)

#: Values and names: techniques, precisions, optimizers, stores, presets, commands, options.
VALUE_SYNONYMS: Rows = (
    # Techniques (docs/planning.md says what each is).
    ("ddp dp dataparallel distributeddataparallel allreduce horovod zero0", ("data",)),
    ("osd optimizersharding zeroone", ("zero1",)),
    ("shardgradop gradientsharding zerotwo", ("zero2",)),
    (
        "zero3 zerothree fullshard fsdp1 fsdp2 fullyshardeddataparallel shardeddataparallel",
        ("fsdp",),
    ),
    ("zero", ("zero1", "zero2", "fsdp")),
    ("hybridshard hybrid mics hybridsharding fsdphybrid", ("hsdp",)),
    (
        "tp tensorparallel tensor tensorparallelism intraop spmd",
        ("shard",),
    ),
    (
        "pp pipeline pipelineparallel pipelineparallelism gpipe 1f1b pipedream interop alpa",
        ("pipeshard",),
    ),
    ("megatron megatronlm modelparallel modelparallelism mp", ("shard", "pipeshard")),
    ("3d 3dparallelism tppp dppp hybridparallel", ("pipeshard",)),
    ("localsgd fedavg federated opendiloco streamingdiloco intellect", ("diloco",)),
    # Precisions.
    ("bfloat16 bfloat bf brain torchbfloat16 bf16mixed", ("bf16",)),
    ("float16 half f16 fp16mixed torchfloat16 torchhalf", ("fp16",)),
    ("float32 float single f32 full torchfloat32 32", ("fp32",)),
    ("tensorfloat32 tensorfloat tensorfloat32tf32", ("tf32",)),
    ("mixed amp 16 mixedprecision autocast", ("bf16", "fp16")),
    # Optimizers, schedules, attention, families.
    ("adam adamw8bit fusedadam fusedadamw adamwtorch torchadamw", ("adamw",)),
    ("cos cosinedecay cosinewithwarmup cosineannealing cosinewithrestarts", ("cosine",)),
    ("warmupstabledecay trapezoidal trapezoid stable", ("wsd",)),
    ("constantwithwarmup flat none", ("constant",)),
    ("lineardecay linearwithwarmup", ("linear",)),
    (
        "flash flashattention flashattention2 fa2 memoryefficient xformers scaleddotproduct",
        ("sdpa",),
    ),
    ("eager math naive manual textbook", ("vanilla",)),
    ("mistral mixtral qwen qwen2 gemma tinyllama llama2 llama3 smollm", ("llama",)),
    # What computes.
    ("gpu nvidia cuda0 rocm hip amd", ("cuda",)),
    ("metal apple mac m1 m2 m3", ("mps",)),
    ("x86 host processor", ("cpu",)),
    ("any best default", ("auto",)),
    # Presets: the names of their makers, and what their sizes are called.
    ("gpt gpt2small gpt2base gpt2124m gpt2117m openaigpt2 nanogpt", ("gpt2",)),
    ("gpt2355m gpt2345m", ("gpt2-medium",)),
    ("gpt2774m gpt2762m", ("gpt2-large",)),
    ("gpt21.5b gpt21558m gpt21.6b", ("gpt2-xl",)),
    ("mistral mistral7bv01 mistralai", ("mistral-7b",)),
    ("mini nano xs tiniest", ("tiny",)),
    ("base normal default", ("small",)),
    ("big", ("large",)),
    ("huge extralarge xlarge xxl", ("xl",)),
    # Vector stores.
    ("postgres postgresql pg psql postgressql", ("pgvector",)),
    ("chromadb", ("chroma",)),
    ("faisscpu faissgpu", ("faiss",)),
    ("qdrantedge qdrantlocal local embedded", ("qdrant",)),
    ("qdrantclient qdrantremote qdranthttp qdrantcloud", ("qdrant_server",)),
    # Launchers, systems to export to, ways to search, clusters.
    ("torchelastic torchdistributed torchdistributedrun torchrunx elastic", ("torchrun",)),
    ("multiprocessing processes thismachine localhost subprocess", ("local",)),
    ("anyscale raycluster", ("ray",)),
    ("ds zero", ("deepspeed",)),
    ("titan torchtitanpy", ("torchtitan",)),
    ("keyword lexical tfidf okapi", ("bm25",)),
    ("semantic vector vectors dense embedding embeddings", ("model",)),
    ("hybrid rrf fusion both", ("fused",)),
    ("local localhost thismachine thiscomputer thishost", ("here",)),
    # Objectives and what follows a fault.
    ("fastest speed minutes duration", ("time",)),
    ("usd price money cheapest cheap dollars", ("cost",)),
    ("efficiency efficient", ("loss_per_dollar",)),
    ("restart retry continue replan elastic", ("recover",)),
    ("abort fail exit end", ("stop",)),
    ("ignore drop omit", ("skip",)),
    ("raise error strict fail abort", ("refuse",)),
    # Commands.
    ("run fit start pretrain learn launch", ("train",)),
    ("create new make setup configure quickstart", ("init",)),
    ("continue restart goon", ("resume",)),
    ("kill cancel abort end quit", ("stop",)),
    ("ls list ps jobs runs show info top", ("status",)),
    ("tail log output", ("logs",)),
    ("find query ask retrieve lookup", ("search",)),
    ("write sample complete completion predict infer inference prompt text", ("generate",)),
    ("server web ui page gui api app http", ("serve",)),
    ("check diagnose health verify selftest env", ("doctor",)),
    ("benchmark measure", ("bench",)),
    ("profile measure", ("probe",)),
    ("estimate price predict simulate cost", ("plan",)),
    ("choose pick autotune", ("select",)),
    ("index vectorize encode vectors", ("embed",)),
    ("preprocess tokenize data tokenizer pack", ("prepare",)),
    ("diff versus vs", ("compare",)),
    ("save convert tohf huggingface", ("export",)),
    ("example tutorial try test", ("demo",)),
    ("clusters devices gpus hosts machines kinds", ("cluster",)),
    # Parts of commands.
    ("create start make", ("up",)),
    ("delete remove rm destroy kill", ("down",)),
    ("ls dir", ("list",)),
    ("run ssh enter shell", ("exec",)),
    # Options.
    ("output outfile outdir outputdir o", ("--out", "--run")),
    ("overwrite override config option", ("--set",)),
    ("strategy parallelism method", ("--technique",)),
    ("background daemon nohup", ("--detach",)),
    ("topk limit n num numresults", ("-k", "--top-k")),
    ("filter", ("--where",)),
    ("maxtokens maxnewtokens length", ("--tokens",)),
    ("temp", ("--temperature",)),
    ("gpu backend accelerator", ("--device",)),
    ("batchsize bs", ("--batch",)),
    ("sequencelength context ctx blocksize", ("--seq-len",)),
    ("dtype", ("--precision",)),
    ("budget duration timelimit hours minutes maxtime", ("--time", "--hours", "--budget")),
    ("hosts nodes machines", ("--cluster",)),
    ("vectordb vectorstore db database", ("--store",)),
    # Where text comes from.
    ("pydoc pythondocs pythondoc docspython", ("pydocs",)),
)


class NotOffered(NamedTuple):
    """Words of the field for things that farspan does not do, and what to read instead of a
    likeness."""

    #: A name that is offered where such a word is meant.
    beside: str
    words: str
    reason: str


NOT_OFFERED = (
    NotOffered(
        "bf16",
        "fp8 float8 e4m3 e5m2 fp8mixed mxfp8 nvfp8 transformerengine te fp4 mxfp4 nvfp4 nf4 int8 "
        "int4 8bit 4bit 8 4 bnb float64 fp64 double f64 64",
        "farspan computes in 16 or 32 bits a number",
    ),
    NotOffered(
        "data",
        "sp sequenceparallel cp contextparallel ringattention ulysses ep expertparallel moe expert "
        "zeroinfinity offload cpuoffload zerooffload parameterserver async hogwild",
        "farspan has no technique of this name",
    ),
    NotOffered(
        "adamw",
        "sgd nesterov rmsprop adagrad adadelta adafactor lion lamb lars shampoo soap sophia nadam "
        "radam adamax ademamix schedulefree prodigy galore",
        "farspan has no such optimizer",
    ),
    NotOffered(
        "cosine",
        "polynomial poly exponential step multistep onecycle cyclic plateau reducelronplateau "
        "inversesqrt rsqrt noam",
        "farspan has no such schedule",
    ),
    NotOffered(
        "cuda",
        "tpu xla npu xpu hpu gaudi trainium neuron ipu vulkan opencl directml intel",
        "farspan trains on CPUs, CUDA or ROCm GPUs, and Apple GPUs",
    ),
    NotOffered(
        "gpt2",
        "bert roberta distilbert t5 bart gptj gptneo gptneox pythia falcon bloom mamba rwkv phi "
        "deepseek gpt4 electra vit clip xlnet albert deberta",
        "farspan trains models of the GPT-2, OPT and Llama families",
    ),
    NotOffered(
        "qdrant",
        "milvus weaviate pinecone lancedb lance elasticsearch elastic opensearch redis mongodb "
        "mongo vespa sqlite sqlitevec sqlitevss duckdb annoy hnswlib hnsw usearch marqo vald "
        "cassandra neo4j clickhouse turbopuffer mysql",
        "farspan has no such store",
    ),
    NotOffered(
        "torchrun",
        "slurm sbatch srun k8s kubernetes kubectl mpi mpirun openmpi horovod accelerate deepspeed "
        "dask spark skypilot lsf pbs sge docker",
        "farspan starts no workers through it",
    ),
    NotOffered(
        "deepspeed",
        "megatron megatronlm megatroncore nemo fairscale colossalai accelerate lightning hf "
        "huggingface transformers nanogpt axolotl jax flax maxtext",
        "farspan writes no configuration of this system",
    ),
)
