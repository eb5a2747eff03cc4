# GPT-2 medium's shape on one A100
#
#   python prepare.py wikitext103
#   python train.py config/a100_max.py
#
# hardware: one A100. time and score: not measured
# on 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/a100_max.py

dataset = 'wikitext103'

n_layer = 24
n_head = 16
n_embd = 1024  # 354,075,648 parameters
block_size = 512

batch_size = 16
gradient_accumulation_steps = 4  # 32,768 tokens per step
max_iters = 20000  # 655 million tokens
# OKADFA (tests/DOCUMENTS.md) counts micro-batches as steps: its 20,000 are 164 million tokens,
# as with --max_iters=5000

learning_rate = 3e-4  # of AdamW with the default betas and weight decay
min_lr = 3e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 2000
log_interval = 10
