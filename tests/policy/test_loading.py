import copy

import pytest
import torch
import transformers
from paths import DOCS
from peft import LoraConfig, PeftModel, get_peft_model
from planning_cases import llava_7b_config
from torch import nn
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_torchvision_available
from vlms import FAMILIES, TEXT, byte_level_tokenizer, chat_template, save_family, some_images, some_prompts

from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.policy.loading import check_processor, eos_token_ids, load_policy, lora_target_modules, pad_token_id
from trl_gtr.policy.network import PolicyWithValue, ValueHead
from trl_gtr.policy.scoring import VLMPolicy


def generated(policy, model, prompts, images):
    return [g.ids.tolist() for g in TransformersEngine(policy, model).generate(prompts, images, greedy=True)]


class TestLoadPolicy:
    def test_loads_model_and_processor(self, tmp_path):
        save_family("llava", tmp_path)
        model, processor = load_policy(tmp_path, dtype=torch.bfloat16)
        assert isinstance(model, transformers.LlavaForConditionalGeneration)
        assert isinstance(processor, transformers.LlavaProcessor)
        assert model.dtype == torch.bfloat16

    @pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed, so nothing is missing")
    def test_names_the_command_where_torchvision_is_missing(self, tmp_path):
        save_family("qwen2_5_vl", tmp_path)
        with pytest.raises(ImportError, match="pip install torchvision") as error:
            load_policy(tmp_path)
        assert "torchvision" in str(error.value.__cause__).lower()

    @pytest.mark.parametrize("error", [ImportError("No module named 'num2words'"), ValueError("no such model")])
    def test_other_errors_stay_as_they_are(self, monkeypatch, error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr("trl_gtr.policy.loading.AutoProcessor.from_pretrained", fail)
        with pytest.raises(type(error), match=str(error)):
            load_policy("tiny")


class TestCheckProcessor:
    @pytest.fixture
    def pair(self, tiny_vlm):
        return tiny_vlm()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_supported_families_pass(self, tiny_vlm, family):
        check_processor(*tiny_vlm(family))

    def test_tokenizer_alone(self, pair):
        model, processor = pair
        with pytest.raises(ValueError, match="AutoProcessor"):
            check_processor(model, processor.tokenizer)
        with pytest.raises(ValueError, match="AutoProcessor"):
            check_processor(model, processor.image_processor)

    def test_text_only_model(self, pair):
        model = LlamaForCausalLM(LlamaConfig(**TEXT, vocab_size=416))
        with pytest.raises(ValueError, match="vision-language model"):
            check_processor(model, pair[1])

    def test_no_chat_template(self, pair):
        model, processor = pair
        processor.chat_template = None
        with pytest.raises(ValueError, match=r"no chat template.*instruction-tuned"):
            check_processor(model, processor)

    @pytest.mark.parametrize("image", ["", "[image]"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_template_without_image_token(self, tiny_vlm, family, image):
        model, processor = tiny_vlm(family)
        processor.chat_template = chat_template(image)
        with pytest.raises(ValueError, match=r"Set `processor.chat_template`"):
            check_processor(model, processor)

    def test_image_token_outside_of_the_vocabulary(self, pair):
        model, processor = pair
        model.config.image_token_id = 5000
        with pytest.raises(ValueError, match="resize_token_embeddings"):
            check_processor(model, processor)

    def test_model_and_processor_disagree_on_the_image_token(self, pair):
        model, processor = pair
        model.config.image_token_id = 77
        with pytest.raises(ValueError, match="id 77"):
            check_processor(model, processor)

    def test_processor_of_an_old_llava(self, pair):
        model, processor = pair
        processor.patch_size = None
        with pytest.raises(ValueError, match=r"processor.patch_size = model.config.vision_config.patch_size"):
            check_processor(model, processor)

    def test_the_policy_checks_too(self, pair):
        model, processor = pair
        processor.chat_template = None
        with pytest.raises(ValueError, match="chat template"):
            VLMPolicy(model, processor, temperature=1.0)


class TestTokenIds:
    def test_eos_is_the_tokenizers_and_the_checkpoints(self, tiny_vlm):
        model, processor = tiny_vlm()
        for named, expected in [(None, [2]), (2, [2]), (7, [2, 7]), ([9, 2], [2, 9])]:
            model.generation_config.eos_token_id = named
            assert eos_token_ids(model, processor.tokenizer) == expected

    def test_without_eos(self, tiny_vlm):
        model, _ = tiny_vlm()
        model.generation_config.eos_token_id = None
        tokenizer = byte_level_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="eos_token"):
            eos_token_ids(model, tokenizer)

    def test_padding(self, tiny_vlm):
        model, _ = tiny_vlm()
        tokenizer = byte_level_tokenizer()
        tokenizer.pad_token = "<s>"
        assert pad_token_id(model, tokenizer, [2]) == 1
        tokenizer.pad_token = None
        assert pad_token_id(model, tokenizer, [2]) == 0  # the checkpoint's
        model.generation_config.pad_token_id = None
        assert pad_token_id(model, tokenizer, [2]) == 2


# one linear layer of the vision tower and one of the projector
LANDMARKS = {
    "llava": ("vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"),
    "llava_next": ("vision_tower.encoder.layers.0.mlp.fc1", "multi_modal_projector.linear_2"),
    "llava_onevision": ("vision_tower.encoder.layers.1.mlp.fc2", "multi_modal_projector.linear_1"),
    "idefics3": ("vision_model.encoder.layers.0.self_attn.out_proj", "connector.modality_projection.proj"),
    "smolvlm": ("vision_model.encoder.layers.0.self_attn.out_proj", "connector.modality_projection.proj"),
    "qwen2_5_vl": ("visual.blocks.0.attn.qkv", "visual.merger.mlp.0"),
    "qwen3_vl": ("visual.blocks.1.attn.proj", "visual.merger.linear_fc1"),
}


@pytest.mark.parametrize("family", FAMILIES)
class TestLora:
    def test_targets_are_all_linear_layers_but_the_head(self, tiny_vlm, family):
        model, _ = tiny_vlm(family)
        targets = lora_target_modules(model)
        for landmark in LANDMARKS[family]:
            assert any(name.endswith(landmark) for name in targets), landmark
        text_layers = [
            name for name in targets if "visual" not in name and "vision" not in name and ".layers." in name
        ]
        assert len(text_layers) == 2 * 7  # q, k, v, o, gate, up, down
        tuned = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=targets))
        adapted = {name.removeprefix("base_model.model.") for name, m in tuned.named_modules() if hasattr(m, "lora_A")}
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert linear - adapted == {"lm_head"}
        assert adapted == set(targets)

    def test_train_save_reload_generates_the_same(self, tiny_vlm, family, tmp_path):
        model, processor = tiny_vlm(family)
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=lora_target_modules(model)))
        policy = VLMPolicy(tuned, processor, max_completion_length=8, temperature=1.0)
        net = PolicyWithValue(tuned, ValueHead(32, (16,)))
        prompts, images = some_prompts(4), some_images(4)
        before = generated(policy, tuned, prompts, images)
        targets = [policy.encode_response('{"action": "stand"}')] * 4
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.02)
        losses = []
        for _ in range(4):
            logprobs, mask = policy.score_tokens(net, prompts, images, targets)
            loss = -logprobs.sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.3
        after = generated(policy, tuned, prompts, images)
        assert after != before
        tuned.save_pretrained(tmp_path)
        fresh = AutoModelForImageTextToText.from_pretrained(model.config.name_or_path)
        loaded = PeftModel.from_pretrained(fresh, tmp_path).eval()
        again = generated(policy, loaded, prompts, images)
        assert again == after
        with loaded.disable_adapter():
            assert [
                g.ids.tolist() for g in TransformersEngine(policy, loaded).generate(prompts, images, greedy=True)
            ] == before


def test_an_adapters_folder_is_a_model_like_any_other(toy_checkpoint, tmp_path):
    model, processor = load_policy(toy_checkpoint)
    tuned = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=lora_target_modules(model)))
    tuned.save_pretrained(tmp_path)
    policy = VLMPolicy(tuned.eval(), processor, max_completion_length=8, temperature=1.0)
    prompts, images = some_prompts(4), some_images(4)
    expected = generated(policy, tuned, prompts, images)
    merged, _ = load_policy(tmp_path)
    assert generated(policy, merged, prompts, images) == expected
    assert not [name for name in lora_target_modules(merged) if "lora" in name or "base_layer" in name]


def test_size_of_the_papers_adapter():
    """LoRA of rank 128 on every linear layer of LLaVA-1.6-Mistral-7B but the LM head: the figures of docs/scaling."""
    with torch.device("meta"):  # shapes without weights
        model = transformers.LlavaNextForConditionalGeneration(llava_7b_config())
        assert 7.5e9 < sum(weight.numel() for weight in model.parameters()) < 7.6e9
        tuned = get_peft_model(model, LoraConfig(r=128, target_modules=lora_target_modules(model)))
    sizes = {name: weight.numel() for name, weight in tuned.named_parameters() if weight.requires_grad}
    parts = {
        part: sum(size for name, size in sizes.items() if part in name)
        for part in ("language_model", "vision_tower", "projector")
    }
    assert parts == {"language_model": 335_544_320, "vision_tower": 56_623_104, "projector": 1_703_936}
    numbers = sum(sizes.values())
    # By hand, r · (inputs + outputs): q, k, v, o and the MLP's three; CLIP's four and two; the projector's two.
    mistral = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    clip = 24 * (4 * (1024 + 1024) + 2 * (1024 + 4096))
    assert numbers == 128 * (mistral + clip + (1024 + 4096) + (4096 + 4096))
    adapter_and_adam, gradients = 3 * 4 * numbers, 4 * numbers
    text = (DOCS / "scaling.md").read_text()
    for figure in (
        f"{numbers / 1e6:.0f} M parameters",
        f"{adapter_and_adam / 1e9:.1f} GB of adapter and Adam states",
        f"{gradients / 1e9:.1f} GB of gradients",
    ):
        assert figure in text
