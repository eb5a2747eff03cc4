# a small GPT on the source code of Python's standard library: no download, three minutes anywhere
#
#   python prepare.py
#   python train.py config/quickstart.py
#   python sample.py --start="def "
#
# hardware: 2 CPU cores with bf16 units. measured there on the full held-out split (24 files): on an idle EPYC
# 1.10 bits per byte after the 2,970 steps that fit where nothing had been compiled before (in float32 1.15
# after 1,591, compiled before); on a slow and shared Xeon 1.13 to 1.17 after 1,808 to 1,248

dataset = 'stdlib'  # in BPE tokens of 2.8 bytes

preset = 'hybrid'  # modern, with convolutions in some layers and vectors for pairs of tokens
mixer = 'CAA'  # a convolution over four tokens, two layers of attention; on prose --mixer=CCA is 1% better
x0_mix = True  # 0.3 to 1% better on this text, 0.1 to 0.4% worse on prose
n_layer = 3
n_head = 2  # of 64 channels
n_embd = 128  # 5,292,726 parameters, 4.2 million of them for pairs of tokens
block_size = 256  # with 512 the loss is 5% lower, but short samples loop: tests/bench/LOG.md

batch_size = 8  # many small steps learn fastest in a short run
gradient_accumulation_steps = 1
time_budget = 3  # minutes

optimizer = 'muon'
muon_lr = 0.016
muon_momentum = 0.85  # lower than usual, because the run is short
learning_rate = 8e-3
embed_lr = 0.05
weight_decay = 0.05
multi_token = 0.5  # learns from the two tokens after the next one, too, in the first part of the run
lr_schedule = 'linear'
warmup_iters = 10
min_lr = 0.0

eval_interval = 2000
log_interval = 50
