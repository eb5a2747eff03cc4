# evaluates weights on the full validation split and exits; writes nothing
#
#   python prepare.py openwebtext                                            # 25 GB to download
#   python train.py config/eval.py --init_from=gpt2-xl --dataset=openwebtext  # OpenAI's weights
#   python train.py config/eval.py --init_from=out --dataset=stdlib           # the best of a run
#
# hardware: any. not measured here; on its OpenWebText split nanoGPT reports losses of 3.12 (gpt2),
# 2.84 (-medium), 2.67 (-large) and 2.54 (-xl)

init_from = 'gpt2'
eval_only = True
eval_tokens = None  # the full split
batch_size = 8
gradient_accumulation_steps = 8
