class QueryTable:
    dim = 384

    def save(self, path):
        path.write_bytes(b"x")

    @classmethod
    def load(cls, path):
        return cls()

    def queries(self, texts):
        import numpy as np

        return np.ones((len(texts), 384), np.float32) / 384**0.5


def distill_query_table(*args):
    return QueryTable()
