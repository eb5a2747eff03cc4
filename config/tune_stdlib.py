# LoRA that teaches a model of Python source to write the bodies of functions
#
#   python prepare.py stdlib --name=stdlib_4096 --tokenizer=bpe:4096 --val=0.1
#   python train.py config/quickstart.py --dataset=stdlib_4096 --out_dir=out-stdlib --time_budget=8
#   python prepare.py stdlib --format=functions --name=functions \
#       --tokenizer=out-stdlib --val=0.1
#   python train.py config/tune_stdlib.py
#   python sample.py --out_dir=out-tune-stdlib \
#       --eval_code=data/functions/val.jsonl --max_new_tokens=200
#
# hardware: 2 CPU cores with bf16 units. measured there (569 held-out functions, 12 minutes for all of
# it): syntax accuracy from 0.36 to 0.61, BLEU from 1.7 to 1.9. ranks 8 and 16, and a rate of 2.5e-4,
# end within the intervals of these

out_dir = 'out-tune-stdlib'
init_from = 'out-stdlib'
dataset = 'functions'
pack_rows = True

lora_rank = 32
lora_alpha = 64

batch_size = 8
gradient_accumulation_steps = 1
max_epochs = 3

learning_rate = 2e-3
weight_decay = 0.0
warmup_iters = 0.05
min_lr = 0.0

eval_interval = 500
eval_tokens = 2**16
log_interval = 50
