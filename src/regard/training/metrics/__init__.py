"""How good the output is: translations, classes, captions, language models; and what to look at first.

Every metric comes as a function (a small result with ``.to_dict()``) and as ``*_statistics`` (what each example adds to
it), which the paired bootstrap resamples.
BLEU and chrF count from 0 to 100 as sacreBLEU does; accuracy, F1 and exact match are shares from 0 to 1.
"""
