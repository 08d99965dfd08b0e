"""How good the output is: translations, classes, captions, language models; and what to look at first.

Every metric comes as a function (a small result with ``.to_dict()``) and as ``*_statistics`` (what each example adds to
it), which the paired bootstrap resamples.
BLEU and chrF count from 0 to 100 as sacreBLEU does; accuracy, F1 and exact match are shares from 0 to 1.
"""

from .classification_metrics import (
    ClassificationScores,
    ClassScores,
    accuracy_statistics,
    classification,
    macro_f1_statistics,
)
from .language_metrics import LanguageScores, language_model, loss_statistics, perplexity, strided_losses
from .statistics import MetricResult, Statistics, mean_statistics
from .translation_metrics import (
    CaptionScores,
    TranslationScores,
    bleu_n_statistics,
    bleu_statistics,
    bleu_tokenizer,
    captions,
    chrf_statistics,
    cider_statistics,
    exact_statistics,
    sentence_chrf,
    translation,
)

__all__ = [
    "CaptionScores",
    "ClassScores",
    "ClassificationScores",
    "LanguageScores",
    "TranslationScores",
    "captions",
    "classification",
    "language_model",
    "translation",
    "bleu_tokenizer",
    "perplexity",
    "sentence_chrf",
    "strided_losses",
    "MetricResult",
    "Statistics",
    "accuracy_statistics",
    "bleu_n_statistics",
    "bleu_statistics",
    "chrf_statistics",
    "cider_statistics",
    "exact_statistics",
    "loss_statistics",
    "macro_f1_statistics",
    "mean_statistics",
]
