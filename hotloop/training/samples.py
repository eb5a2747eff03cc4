"""Texts that a model writes into the log while it trains."""

import torch

from hotloop.data.tokenizer import prompt_ids, tokenizer_from
from hotloop.inference.generate import Sampling, generate
from hotloop.training.dataloader import micro_seed
from hotloop.training.shard import is_sharded, reshard


def sampling_tokenizer(cfg, meta, context):
    """The tokenizer for sample_interval, or None. ValueError early if it cannot encode the prompt."""
    if not cfg.sample_interval:
        return None
    tokenizer = tokenizer_from(meta['tokenizer'])
    tokenizer.begin = context.get('bos')
    prompt_ids(tokenizer, cfg.sample_prompt)
    return tokenizer


def write_sample(run):
    """Logs a sample of the current model. It uses a separate seed, so training does not change."""
    sharded = is_sharded(run.model)  # then all processes run it, and as many steps
    if run.env.rank and not sharded:
        return  # and wait at the next reduction
    cfg, tokenizer, step = run.cfg, run.tokenizer, run.state.iter_num
    sampling = Sampling(cfg.sample_tokens, temperature=0.8, top_k=200, vocab=tokenizer.n_vocab,
                        stop=set() if sharded else {tokenizer.eot})
    prompt, ids, was_training = prompt_ids(tokenizer, cfg.sample_prompt), [], run.model.training
    run.model.eval()
    deterministic = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode('default')  # the draw sums probabilities, which CUDA refuses under it
    try:
        for drawn in generate(run.model, [prompt], sampling, seeds=[micro_seed(cfg.seed, step, 0)]):
            ids += [token for _, token, _ in drawn]
        if tokenizer.eot in ids:
            ids = ids[:ids.index(tokenizer.eot)]
        text = cfg.sample_prompt + tokenizer.decode(ids).decode('utf-8', 'replace')
    except ValueError as e:  # logits that are not finite; losses decide whether the run stops
        text = f'no text: {e}'
    finally:
        torch.set_deterministic_debug_mode(deterministic)
    run.model.train(was_training)
    reshard(run.model)
    run.log.write(f'--- sample at step {step}:\n{text}\n---', step=step, sample=text)
