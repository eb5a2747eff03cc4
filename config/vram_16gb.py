# a GPT with SwiGLU and label smoothing for a GPU of 16 GB
#
#   python prepare.py wikitext103
#   python train.py config/vram_16gb.py
#
# hardware: one GPU of 16 GB (RTX 4080, V100, T4). time and score: not measured

dataset = 'wikitext103'

mlp = 'swiglu'
n_layer = 12
n_head = 12
n_embd = 768  # 152,095,488 parameters
n_ff = 3072
block_size = 256
label_smoothing = 0.1

batch_size = 128
gradient_accumulation_steps = 4  # 131,072 tokens per step
recompute = 'selective'  # without it a step needs 20 GB
max_iters = 3600  # 4 epochs

learning_rate = 6e-4
min_lr = 6e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 400
log_interval = 10
