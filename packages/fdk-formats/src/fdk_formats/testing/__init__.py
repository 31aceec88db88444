"""Conformance kit: the same tests for every backend. See docs/guide/backends.md."""

from fdk_formats.testing.cases import Case, cases, random_quantised
from fdk_formats.testing.conformance import (
    check_backend,
    check_bad_input,
    check_decode,
    check_golden,
    check_in_place,
    check_numerics,
    layout_digest,
    nrmse,
    poisoned,
)
from fdk_formats.testing.experts import (
    ExpertCase,
    check_expert_backend,
    check_expert_bad_input,
    check_expert_bytes,
    check_expert_decode,
    check_expert_numerics,
    expert_cases,
)
from fdk_formats.testing.golden import golden_codes, golden_packed

__all__ = [
    "Case",
    "ExpertCase",
    "cases",
    "check_backend",
    "check_bad_input",
    "check_decode",
    "check_expert_backend",
    "check_expert_bad_input",
    "check_expert_bytes",
    "check_expert_decode",
    "check_expert_numerics",
    "check_golden",
    "check_in_place",
    "check_numerics",
    "expert_cases",
    "golden_codes",
    "golden_packed",
    "layout_digest",
    "nrmse",
    "poisoned",
    "random_quantised",
]
