# quick experiments on one A100: the shape of GPT-2 small with half its context
#
#   python prepare.py wikitext103
#   python train.py config/a100_fast.py
#
# hardware: one A100. time and score: not measured
# on 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/a100_fast.py

dataset = 'wikitext103'

n_layer = 12
n_head = 12
n_embd = 768  # 123,980,544 parameters
block_size = 512

batch_size = 32
gradient_accumulation_steps = 1  # 16,384 tokens per step
max_iters = 3000  # 49 million tokens

learning_rate = 3e-4  # of AdamW with the default betas and weight decay
min_lr = 3e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 500
log_interval = 10
