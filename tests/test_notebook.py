"""README's cells are a notebook, which runs from a fresh folder on a CPU."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = ('--time_budget=None --max_iters=20 --batch_size=2 --n_layer=1 --n_embd=32 --block_size=64 '
         '--eval_tokens=1024 --device=cpu --compile=False')


def notebook(text):
    """Return cells, separated by empty lines, as the JSON of an .ipynb file (nbformat 4.4)."""
    cells = [{'cell_type': 'code', 'metadata': {}, 'execution_count': None, 'outputs': [],
              'source': cell.splitlines(keepends=True)} for cell in text.strip().split('\n\n')]
    return json.dumps({'nbformat': 4, 'nbformat_minor': 4, 'metadata': {}, 'cells': cells})


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='needs the repository, to clone it')
def test_the_cells_of_readme_run_from_a_fresh_folder(tmp_path, monkeypatch):
    """The clone is local, the packages are those that are here, the drive is a folder, the run is small."""
    drive = tmp_path / 'drive'
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    text = re.search(r'^```python\n(!git clone.*?)^```', readme, re.M | re.S)[1]
    for old, new in (('URL_OF_YOUR_COPY', str(ROOT)), ('pip install -q -r requirements.txt', 'true'),
                     ('/content/drive/MyDrive', str(drive)), ('quickstart.py', f'quickstart.py {SMALL}'),
                     ('--start="def "', '--start="def " --device=cpu --num_samples=1 --max_new_tokens=20')):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / 'notebook.ipynb'
    path.write_text(notebook(text))
    mounted = []
    colab = types.ModuleType('google.colab')
    colab.drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, 'google', types.ModuleType('google'))
    monkeypatch.setitem(sys.modules, 'google.colab', colab)
    monkeypatch.setenv('PATH', os.pathsep.join((os.path.dirname(sys.executable), os.environ['PATH'])))
    printed = []
    for cell in json.loads(path.read_text())['cells']:
        for line in cell['source']:
            if line.startswith('!'):
                done = subprocess.run(['bash', '-c', line[1:]], cwd=tmp_path, text=True, capture_output=True,
                                      check=False)
                assert done.returncode == 0, done.stderr
                printed.append(done.stdout)
            else:
                exec(line, {})
    prepared, trained, sampled = printed
    assert 'quickstart' in prepared and 'step 20' in trained and sampled.startswith('def ')
    assert mounted == ['/content/drive'] and (drive / 'run' / 'best.pt').is_file()
