# Gemma 2 2B tuned for Python tasks with LoRA of rank 16
#
#   python prepare.py rows.jsonl --name=python_rows --tokenizer=google/gemma-2-2b
#   python train.py config/lora_r16.py
#   python sample.py --out_dir=out-lora-r16 \
#       --eval_code=data/python_rows/val.jsonl --max_new_tokens=384
#
# other ranks: --lora_rank=8 --lora_alpha=16 --out_dir=out-lora-r8, or
# --lora_rank=32 --lora_alpha=64 --out_dir=out-lora-r32
# hardware: one GPU of 40 GB (A100). time and score: not measured
# Gemma needs pip install tokenizers huggingface_hub, and HF_TOKEN of an account that accepted its license

out_dir = 'out-lora-r16'
init_from = 'google/gemma-2-2b'
dataset = 'python_rows'
pack_rows = True
block_size = 768

lora_rank = 16
lora_alpha = 32

batch_size = 8  # windows; each holds several rows
gradient_accumulation_steps = 2
max_epochs = 3

learning_rate = 2.5e-4
weight_decay = 0.01
beta2 = 0.999
warmup_iters = 0.03
min_lr = 0.0

eval_interval = 100
log_interval = 25
