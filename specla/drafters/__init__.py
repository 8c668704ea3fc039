"""Small and cheap guesses at what the target will say next."""

from specla.drafters.base import Drafter, DraftRow, Proposal
from specla.drafters.eagle import EagleDrafter
from specla.drafters.lookup import LookupFirst
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.drafters.synthetic import SyntheticDrafter

__all__ = [
    "DraftRow",
    "Drafter",
    "EagleDrafter",
    "LookupFirst",
    "NgramDrafter",
    "NoDrafter",
    "Proposal",
    "SyntheticDrafter",
]
