# changes a lora or qlora card for a T4: shorter examples, smaller micro-batches
#
#   python train.py config/qlora_r16.py config/tune_t4.py
#
# hardware: one GPU of 16 GB (T4). time and score: not measured

block_size = 512
batch_size = 4
gradient_accumulation_steps = 4
recompute = 'full'

learning_rate = 2e-4

log_interval = 50
