"""Metrics of translations, classes, captions, retrieval and language models, and their comparison by bootstrap.

Each metric is a function that returns its scores, and a ``*_statistics`` function that returns the contribution of each
example, which the paired bootstrap resamples.
BLEU and chrF range from 0 to 100 as in sacreBLEU; accuracy, F1 and exact match from 0 to 1.
"""
