# GPT-2 large's shape on one A100
#
#   python prepare.py wikitext103
#   python train.py config/a100_mega.py
#
# hardware: one A100. time and score: not measured
# on 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/a100_mega.py

dataset = 'wikitext103'

n_layer = 36
n_head = 20
n_embd = 1280  # 772,926,720 parameters
block_size = 512

batch_size = 8
gradient_accumulation_steps = 8  # 32,768 tokens per step
max_iters = 30000  # 983 million tokens
# OKADFA (tests/DOCUMENTS.md) counts micro-batches as steps: its 30,000 are 123 million tokens,
# as with --max_iters=3750

learning_rate = 3e-4  # of AdamW with the default betas and weight decay
min_lr = 3e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 3000
log_interval = 10
