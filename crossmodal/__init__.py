"""Image-text pairs: fusion, text towers, matching, captioning and retrieval.

Will live here: `fusion` (norm each modality, then cross-attend), `text` (towers and tokenizer),
`matcher`, `captioner` (LSTM decoders with and without attention, a Transformer decoder),
`retrieval`, `loss` and the data of pairs. Importing this package registers their models.
"""
