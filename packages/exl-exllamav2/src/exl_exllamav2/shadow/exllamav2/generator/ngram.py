"""N-gram drafts; exl has its own."""

from exl_core.speculate.ngram import NgramDrafter as NgramCache
