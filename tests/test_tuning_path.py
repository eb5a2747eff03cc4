"""README's "Tuning a small open model", command by command, with a tiny random base, offline."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import load
from test_code_eval import ADD
from test_families import all_logits, error_against

from hotloop.pretrained import open_weights
from model import GPT

ROOT = Path(__file__).resolve().parent.parent
CHATML = ('{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'
          '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}')
SIZES = ('--block_size=128 --batch_size=2 --gradient_accumulation_steps=2 --max_epochs=20 --warmup_iters=2 '
         '--learning_rate=1e-2 --eval_interval=20 --log_interval=1 --device=cpu --dtype=float32 '
         '--compile=False')
GREEDY = '--temperature=0 --max_new_tokens=12 --device=cpu --dtype=float32'


def write_base(folder):
    """A folder as transformers writes it: a Qwen2 with random weights, its tokenizer and its template."""
    transformers = pytest.importorskip('transformers', reason='makes the base and loads the export')
    tokenizers = pytest.importorskip('tokenizers', reason="makes the base's tokenizer.json")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    names = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    backend.train_from_iterator([(ROOT / 'prepare.py').read_text(encoding='utf-8')],
                                tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=names,
                                                               initial_alphabet=letters, show_progress=False))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token='<|im_end|>', pad_token='<|endoftext|>', chat_template=CHATML)
    config = transformers.Qwen2Config(
        vocab_size=608, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=2, initializer_range=0.2)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder: a base, 40 chats, a question, two tasks as HumanEval has them, 12 modules."""
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / 'base')
    rows = [{'messages': [{'role': 'user', 'content': f'Add {i} and {i % 7}.'},
                          {'role': 'assistant', 'content': f'The sum is {i + i % 7}.'}]} for i in range(40)]
    files = {'rows': rows, 'ask': [{'prompt': 'Add 3 and 3.'}], 'tasks': [ADD, {**ADD, 'task_id': 'T/1'}]}
    for name, lines in files.items():
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (tmp_path / 'code').mkdir()
    for i in range(12):
        body = f'def add{i}(x):\n    """Adds {i} to x."""\n    return x + {i}\n'
        (tmp_path / 'code' / f'm{i}.py').write_text(body)
    return tmp_path


def start(home, line):
    """Starts a command of README in the user's folder."""
    script, *flags = line.split(' ')
    return subprocess.Popen([sys.executable, str(ROOT / script), *flags], cwd=home, text=True,
                            env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(home, line, typed=''):
    """The standard output of a command that succeeds."""
    process = start(home, line)
    out, err = process.communicate(typed, timeout=300)
    assert process.returncode == 0, err
    return out


def train_with_a_stop(home, line):
    """Trains, with a SIGTERM after step 10 and a resume. Returns what the two runs printed."""
    process = start(home, line)
    first = []
    for printed in process.stdout:
        first.append(printed)
        if printed.startswith('step 10: loss'):
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 143, process.stderr.read()
    process.communicate()
    return ''.join(first), run(home, f'train.py --init_from=resume --out_dir=out-lora {SIZES}')


@pytest.mark.slow
def test_the_path_from_a_base_to_a_judged_export(home):
    before = run(home, f'sample.py --init_from=base --start=The {GREEDY}')
    assert before.startswith('The')
    assert 'chatml template' in run(home, 'prepare.py rows.jsonl --name=rows --tokenizer=base')
    first, second = train_with_a_stop(home, 'train.py --init_from=base --dataset=rows --pack_rows=True '
                                            f'--lora_rank=8 --out_dir=out-lora {SIZES}')
    assert 'packing: train, ' in first and 'step 11: loss' in first + second and 'step 10: loss' not in second
    losses = [float(loss) for loss in re.findall(r'^step \d+: loss ([\d.]+),', first + second, re.M)]
    assert losses[-1] < losses[0] - 1
    assert all('.lora_' in name for name in load(home / 'out-lora' / 'best.pt')['model'])

    chat = run(home, f'sample.py --out_dir=out-lora --chat {GREEDY}', 'Add 3 and 3.\n\n')
    merged = run(home, 'sample.py --init_from=base --adapter=out-lora/adapter --start=FILE:ask.jsonl '
                       f'--output=jsonl {GREEDY}')
    answer = json.loads(merged)['text']
    assert chat == f'> {answer}\n> ' and answer.startswith('The sum is')

    written = run(home, 'sample.py --out_dir=out-lora --export=tuned')
    assert written == 'wrote tuned: Qwen2ForCausalLM, float32\n'
    check_export(home)

    run(home, 'prepare.py code --format=functions --name=functions --tokenizer=base')
    judged = run(home, 'sample.py --out_dir=out-lora --eval_code=data/functions/val.jsonl --output=jsonl '
                       f'{GREEDY}')
    count = len((home / 'data' / 'functions' / 'val.jsonl').read_text().splitlines())
    assert f'"metric": "syntax", "tasks": {count}, "answers": {count}' in judged
    table = run(home, f'sample.py --out_dir=out-lora --eval_code=tasks.jsonl --run_code {GREEDY}')
    assert re.search(r'^pass@1      2        2  0\.0000', table, re.M)


def check_export(home):
    """transformers computes the logits of the run, which are not the base's."""
    import transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / 'tuned', attn_implementation='eager')
    ids = torch.randint(600, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
    errors = []
    for folder in ('out-lora', 'base'):
        found = open_weights(str(home / folder), 'data')
        model = GPT.from_checkpoint(found.model_args, found.weights).eval()
        errors.append(error_against(expected, all_logits(model, ids)))
    assert errors[0] < 1e-5 and errors[1] > 1e-2
