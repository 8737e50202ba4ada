"""A small training of TRL, by SFT or DPO, of an adapter; run by torchrun, see `job_options`."""

from __future__ import annotations

import torch
from datasets import Dataset
from job_options import job_options
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import callbacks_of, run_training
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

options = job_options()


words = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
vocabulary = Tokenizer(
    models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>")
)
vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>"
)
generator = torch.Generator().manual_seed(1)


def text(n_words: int) -> str:
    numbers = torch.randint(2, 32, (n_words,), generator=generator).tolist()
    return "".join(f" {words[number]}" for number in numbers)


torch.manual_seed(3)  # of the base model, which is in no step
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,  # a base model that has learned something
    )
)
settings = {
    "output_dir": options.root,
    "use_cpu": True,
    "bf16": False,
    "max_steps": options.steps,
    "save_steps": options.save_every,
    "save_total_limit": options.keep,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "per_device_train_batch_size": 4,
    "report_to": [],
}
if options.dpo:
    kind, arguments = DPOTrainer, DPOConfig(**settings)
    columns = {"prompt": 4, "chosen": 6, "rejected": 6}
else:
    kind, arguments = SFTTrainer, SFTConfig(**settings)
    columns = {"text": 12}
trainer = kind(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_list(
        [{name: text(n_words) for name, n_words in columns.items()} for _ in range(256)]
    ),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=callbacks_of(options),
)
run_training(trainer, options)
