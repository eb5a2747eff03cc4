# GPT-2 124M, nanoGPT's recipe: OpenAI's shape, AdamW, half a million tokens per step
#
#   python prepare.py openwebtext
#   torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
#
# hardware: a node of 8 A100. time and score: not measured here;
# nanoGPT reports 4 days on 8 A100 40GB, loss 2.85

dataset = 'openwebtext'

preset = 'gpt2'
n_layer = 12
n_head = 12
n_embd = 768  # 124,373,760 parameters
block_size = 1024

batch_size = 12
gradient_accumulation_steps = 5 * 8  # 480 sequences, 491,520 tokens per step
max_iters = 600000

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
log_interval = 10
