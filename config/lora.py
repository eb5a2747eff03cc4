# LoRA on rows of your own, from any model that init_from takes
#
#   python prepare.py rows.jsonl --tokenizer=Qwen/Qwen2.5-0.5B
#   python train.py config/lora.py --init_from=Qwen/Qwen2.5-0.5B --dataset=rows --block_size=512
#   python sample.py --out_dir=out-lora --chat
#
# hardware: one GPU, or a CPU for a small model. time and score: not measured

out_dir = 'out-lora'
pack_rows = True

lora_rank = 16
lora_alpha = 32

batch_size = 4  # windows; each holds several rows
gradient_accumulation_steps = 2
max_epochs = 3

learning_rate = 2e-4
weight_decay = 0.01
beta2 = 0.999
warmup_iters = 0.05
min_lr = 0.0

eval_interval = 20
log_interval = 5
