# OKADFA: kernelized orthogonal attention, trained by direct feedback alignment, at 124 million parameters
#
#   python prepare.py wikitext103
#   python train.py config/okadfa.py
#   python train.py config/okadfa.py --feedback=backprop   # the same model, trained by backpropagation
#
# hardware: one A100. time and score: not measured; config/okadfa_cpu.py is a small one for a CPU

dataset = 'wikitext103'

mixer = 'kernel'  # random features in place of softmax: time is linear in the context
qk_norm = True  # bounds the exponents of the features
feedback = 'dfa'
ortho_penalty = 1e-4
n_layer = 12
n_head = 12
n_embd = 768  # 123,980,544 parameters
block_size = 512

batch_size = 32
gradient_accumulation_steps = 1  # 16,384 tokens per step
max_iters = 6000

learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 0.1

eval_interval = 1000
log_interval = 10
