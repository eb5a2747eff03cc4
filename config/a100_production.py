# a wider GPT for long runs on one A100
#
#   python prepare.py wikitext103
#   python train.py config/a100_production.py
#
# hardware: one A100. time and score: not measured
# on 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/a100_production.py

dataset = 'wikitext103'

n_layer = 12
n_head = 16
n_embd = 1024  # 203,056,128 parameters; OKADFA's program keeps n_ff at 3072, which makes 177,890,304
block_size = 512

batch_size = 20
gradient_accumulation_steps = 2  # 20,480 tokens per step
max_iters = 10000  # 205 million tokens
# OKADFA (tests/DOCUMENTS.md) counts micro-batches as steps: its 10,000 are 102 million tokens,
# as with --max_iters=5000

learning_rate = 3e-4  # of AdamW with the default betas and weight decay
min_lr = 3e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 1000
log_interval = 10
