"""Ready encoders as voices of an index: sentence-transformers and model2vec folders, read and run
without either library (docs/decisions/0029-ready-encoders.md).

`opening.open_encoder` reads a folder, `finding.find_encoder` finds the one that run.yaml names.
Only `torch_forward` imports torch, and only passages are embedded with it.
"""
