from __future__ import annotations

from kvbm_core.connectors.engine_blocks import digest_of_config

CONFIG = {"_name_or_path": "/models/a", "transformers_version": "5.1", "rope_theta": 10_000.0, "layers": 4}


def test_a_models_configuration_has_one_digest_wherever_it_lies_and_in_whatever_order() -> None:
    elsewhere = {"layers": 4, "rope_theta": 10_000.0, "_name_or_path": "/models/b", "transformers_version": "5.2"}

    assert digest_of_config(CONFIG) == digest_of_config(elsewhere)
    assert len(digest_of_config(CONFIG)) == 16


def test_what_changes_the_numbers_changes_the_digest() -> None:
    assert digest_of_config(CONFIG | {"rope_theta": 20_000.0}) != digest_of_config(CONFIG)
    assert digest_of_config(CONFIG | {"rope_scaling": None}) != digest_of_config(CONFIG)
