"""README's "Tuning a small open model", command by command, with a tiny random base, offline."""

import io
import json
import re
import sys

import pytest
import torch
from conftest import ROOT, all_logits, error_against, load, stop_at

import prepare
import sample
import train
from hotloop.weights.load import load_weights
from model import GPT

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
def run(tmp_path, monkeypatch, capsys):
    """run(program, flags, typed) -> its standard output, in a folder with a base, 40 rows, a question."""
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / 'base')
    rows = [{'instruction': f'Add {i} and {i % 7}.', 'output': f'The sum is {i + i % 7}.'} for i in range(40)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (tmp_path / 'ask.jsonl').write_text('{"prompt": "Add 3 and 3."}')

    def call(program, flags, typed='', code=0):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(typed.encode())))
        capsys.readouterr()
        assert (program.main(flags.split(' ')) or 0) == code
        return capsys.readouterr().out
    return call


@pytest.mark.slow
def test_the_path_from_a_base_to_an_export(run, monkeypatch):
    """The training is stopped and resumed."""
    assert run(sample, f'--init_from=base --start=The {GREEDY}').startswith('The')
    prepared = run(prepare, 'rows.jsonl --tokenizer=base')
    command = 'config/lora.py --init_from=base --dataset=rows'
    assert 'template: chatml' in prepared and f'train on it with: python train.py {command}' in prepared
    stop_at(monkeypatch, 10)
    printed = run(train, f'{ROOT}/{command} {SIZES}', code=143)
    printed += run(train, f'--init_from=resume --out_dir=out-lora {SIZES}')
    assert 'packing: train, ' in printed
    losses = [float(loss) for loss in re.findall(r'^step \d+: loss ([\d.]+)', printed, re.M)]
    assert losses[-1] < losses[0] - 1
    assert all('.lora_' in name for name in load('out-lora/best.pt')['model'])

    chat = run(sample, f'--out_dir=out-lora --chat {GREEDY}', 'Add 3 and 3.\n')
    merged = run(sample, '--init_from=out-lora/adapter --start=FILE:ask.jsonl '
                         f'--output=jsonl {GREEDY}')
    answer = json.loads(merged)['text']
    assert chat == f'> {answer}\n> \n' and answer.startswith('The sum is')

    written = run(sample, '--out_dir=out-lora --export=tuned')
    assert written == 'wrote tuned: qwen2, float32\n'
    import transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained('tuned', attn_implementation='eager')
    found = load_weights('out-lora')
    ids = torch.arange(64).view(2, 32)
    expected = all_logits(GPT.from_checkpoint(found.model_args, found.weights).eval(), ids)
    with torch.no_grad():
        assert error_against(expected, theirs(ids).logits) < 1e-5
