"""Every native family gives transformers' own greedy tokens, in float32, for prompts shorter and longer than its window."""

from __future__ import annotations

import json

import pytest
from checkpoints import FAMILIES, Recipe, Tiny
from running import assert_same, run

LENGTHS = (1, 7, 50, 130)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(checkpoint, name):
    tiny = checkpoint(name)
    assert_same(tiny, tiny.prompts(*LENGTHS))


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe-mixed", "gpt2"])
def test_greedy_tokens_are_the_same_on_static_shapes(checkpoint, name):
    tiny = checkpoint(name)
    assert_same(tiny, tiny.prompts(*LENGTHS), device="sim-static")


def test_the_text_part_of_a_gemma3_composite_is_served_alone(checkpoint, tmp_path):
    text = {k: v for k, v in FAMILIES["gemma3"].values.items() if k not in ("bos_token_id", "eos_token_id")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    recipe = FAMILIES["gemma3"]
    values = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    composite = Recipe("Gemma3ForConditionalGeneration", "Gemma3Config", values, recipe.seed, recipe.gain, recipe.embedding, recipe.scales)
    tiny = Tiny.make("gemma3-composite", tmp_path / "model", composite)
    prompts = [[t + 8 for t in prompt] for prompt in checkpoint("qwen2").prompts(3, 60)]  # no image tokens
    prompts = [[min(t, 319) for t in prompt] for prompt in prompts]
    for prompt, got in zip(prompts, run(tiny, prompts), strict=True):
        tiny.check(prompt, got)


def test_smollm3_without_a_list_leaves_every_fourth_layer_unrotated(checkpoint, tmp_path):
    """The list that transformers writes into config.json and the interval that older ones have mean the same."""
    tiny = checkpoint("smollm3-window")
    config = json.loads((tiny.path / "config.json").read_text())
    listed = config.pop("no_rope_layers")
    assert listed == [1, 0, 1, 0] and config["no_rope_layer_interval"] == 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny.path / "model.safetensors")
    prompts = tiny.prompts(9, 40)
    assert run(Tiny("without", tmp_path, tiny.recipe), prompts) == run(tiny, prompts)


@pytest.mark.parametrize("name", ["gemma3", "opt-350m", "mixtral", "phi3", "gpt2"])
def test_made_up_weights_need_no_file(checkpoint, tmp_path, name):
    tiny = checkpoint(name)
    (tmp_path / "config.json").write_text((tiny.path / "config.json").read_text())
    empty = Tiny(name, tmp_path, tiny.recipe)
    got = run(empty, tiny.prompts(5, 20), load_format="dummy", new_tokens=4)
    assert [len(tokens) for tokens in got] == [4, 4]
