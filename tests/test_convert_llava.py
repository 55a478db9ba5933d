"""Conversion of original LLaVA checkpoints, on a tiny one made by hand."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import EXAMPLES
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, PreTrainedTokenizerFast
from vlms import character_tokenizer

from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.policy import llava_checkpoints
from trl_gtr.policy.loading import load_policy
from trl_gtr.policy.scoring import VLMPolicy

HIDDEN, FEED, VISION, HEADS, VOCABULARY, PATCH, SIDE = 16, 24, 8, 2, 103, 14, 28
SCRIPT = EXAMPLES / "convert_llava.py"


def tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return made


def original_weights(newline: bool = True) -> dict[str, torch.Tensor]:
    """Every weight that the original code saves for one layer each, under its own names."""
    generator = torch.Generator().manual_seed(0)
    vision = "model.vision_tower.vision_tower.vision_model."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.mm_projector.0.weight": (HIDDEN, VISION),
        "model.mm_projector.0.bias": (HIDDEN,),
        "model.mm_projector.2.weight": (HIDDEN, HIDDEN),
        "model.mm_projector.2.bias": (HIDDEN,),
        vision + "embeddings.class_embedding": (VISION,),
        vision + "embeddings.patch_embedding.weight": (VISION, 3, PATCH, PATCH),
        vision + "embeddings.position_embedding.weight": ((SIDE // PATCH) ** 2 + 1, VISION),
    }
    if newline:
        shapes["model.image_newline"] = (HIDDEN,)
    layer = "model.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes[f"{layer}self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
    shapes |= {f"{layer}mlp.{name}.weight": (FEED, HIDDEN) for name in ("gate_proj", "up_proj")}
    shapes[f"{layer}mlp.down_proj.weight"] = (HIDDEN, FEED)
    shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    for index in range(2):
        block = f"{vision}encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{block}self_attn.{name}.weight": (VISION, VISION), f"{block}self_attn.{name}.bias": (VISION,)}
        shapes |= {f"{block}mlp.fc1.weight": (FEED, VISION), f"{block}mlp.fc1.bias": (FEED,)}
        shapes |= {f"{block}mlp.fc2.weight": (VISION, FEED), f"{block}mlp.fc2.bias": (VISION,)}
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{block}{name}.weight": (VISION,), f"{block}{name}.bias": (VISION,)}
    for name in ("pre_layrnorm", "post_layernorm"):
        shapes |= {f"{vision}{name}.weight": (VISION,), f"{vision}{name}.bias": (VISION,)}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def original_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlavaMistralForCausalLM"],
        "model_type": "llava_mistral",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mm_vision_tower": "tiny-tower",
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": VISION,
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "image_aspect_ratio": "anyres",
        "image_grid_pinpoints": [[28, 56], [56, 28]],
        "tokenizer_model_max_length": 512,
        "tune_mm_mlp_adapter": False,
        **changes,
    }


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return make_original(tmp_path)


def make_original(tmp_path: Path, newline: bool = True, **changes: Any) -> Path:
    folder, tower = tmp_path / "original", tmp_path / "tower"
    tokenizer().save_pretrained(folder)
    CLIPVisionConfig(
        hidden_size=VISION,
        intermediate_size=FEED,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
    ).save_pretrained(tower)
    config = original_config(mm_vision_tower=str(tower), **changes)
    (folder / "config.json").write_text(json.dumps(config))
    weights = original_weights(newline)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, output: Path, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--source", str(folder), "--output", str(output), *more])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_converted_folder_loads_and_every_weight_is_in_its_place(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, original, tmp_path / "new", "--dtype", "float32")
    model, processor = load_policy(tmp_path / "new")
    assert type(model).__name__ == "LlavaNextForConditionalGeneration"
    new, old = model.state_dict(), original_weights()
    placed = {
        "model.image_newline": "model.image_newline",
        "model.mm_projector.0.weight": "model.multi_modal_projector.linear_1.weight",
        "model.mm_projector.2.bias": "model.multi_modal_projector.linear_2.bias",
        "model.layers.0.self_attn.q_proj.weight": "model.language_model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight": "model.language_model.layers.0.mlp.down_proj.weight",
        "model.norm.weight": "model.language_model.norm.weight",
        "model.vision_tower.vision_tower.vision_model.pre_layrnorm.bias": "model.vision_tower.pre_layrnorm.bias",
        "model.vision_tower.vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight": (
            "model.vision_tower.encoder.layers.1.mlp.fc1.weight"
        ),
    }
    for before, after in placed.items():
        assert torch.equal(new[after], old[before]), after
    # The two tables of words have grown by the image token and padding; the rest is as it was.
    embeddings = new["model.language_model.embed_tokens.weight"]
    assert torch.equal(embeddings[:VOCABULARY], old["model.embed_tokens.weight"])
    assert torch.equal(new["lm_head.weight"][:VOCABULARY], old["lm_head.weight"])
    assert len(new) == len(old)
    total = sum(
        weight.double().sum() for name, weight in old.items() if "embed_tokens" not in name and "lm_" not in name
    )
    kept = sum(
        weight.double().sum() for name, weight in new.items() if "embed_tokens" not in name and "lm_" not in name
    )
    assert total == pytest.approx(kept)
    text = model.config.get_text_config()
    assert (text.model_type, text.rope_parameters["rope_theta"], text.rms_norm_eps) == ("mistral", 1e6, 1e-5)
    assert model.config.vision_feature_layer == -2
    engine = TransformersEngine(VLMPolicy(model, processor, max_completion_length=4, temperature=1.0), model)
    generation = engine.generate(["hello"], [np.zeros((40, 40, 3), np.uint8)], greedy=True)
    assert len(generation[0].ids)


def test_logits_equal_those_of_the_parts_put_together_by_hand(original: Path) -> None:
    """Independent of the map: text only, the converted model must be the plain Mistral with the original's weights."""
    from transformers import MistralConfig, MistralForCausalLM

    model, processor = llava_checkpoints.convert_checkpoint(original, dtype=torch.float32)
    model.save_pretrained(original.parent / "new")
    processor.save_pretrained(original.parent / "new")
    model, _ = load_policy(original.parent / "new")
    config = original_config()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    plain = MistralForCausalLM(
        MistralConfig(
            **{key: config[key] for key in keys}, num_key_value_heads=HEADS, rope_theta=1e6, rms_norm_eps=1e-5
        )
    )
    plain.load_state_dict(
        {k: v for k, v in original_weights().items() if not any(p in k for p in ("vision", "mm_", "image"))}
    )
    ids = torch.tensor([[1, 20, 30, 40, 50]])
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids).logits
        found = model.eval()(input_ids=ids).logits
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[..., :VOCABULARY], expected, rtol=1e-4, atol=1e-5)


def test_without_newline_it_becomes_plain_llava(tmp_path: Path) -> None:
    folder = make_original(
        tmp_path, newline=False, architectures=["LlavaLlamaForCausalLM"], image_aspect_ratio="pad", rope_theta=10000.0
    )
    model, processor = llava_checkpoints.convert_checkpoint(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model.config.text_config.model_type == "llama"
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}], add_generation_prompt=True
    )
    assert text.endswith("USER: <image>\nHi ASSISTANT:")


def test_mistral_chat_format(original: Path) -> None:
    _, processor = llava_checkpoints.convert_checkpoint(original, dtype=torch.float32)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]},
    ]
    assert processor.apply_chat_template(messages) == "<s>[INST] <image>\nHi [/INST] Ho</s>"


def test_loading_an_original_directly_names_the_script(original: Path) -> None:
    with pytest.raises(ValueError, match=r"examples/convert_llava\.py --source"):
        load_policy(original)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_projector_type": "linear"}, "projector of type 'linear'"),
        ({"architectures": ["LlavaGemmaForCausalLM"]}, "Can't convert a LlavaGemmaForCausalLM"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llava_checkpoints.convert_checkpoint(make_original(tmp_path, **changes), dtype=torch.float32)


def test_an_unknown_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="base_model"):
        llava_checkpoints.convert_name("base_model.model.lm_head.lora_A.weight")


def test_script_keeps_what_is_there(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, original, tmp_path / "full")
    assert "is not empty: choose another --output" in capsys.readouterr().err
