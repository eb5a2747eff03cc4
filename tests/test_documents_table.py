"""The table of the reference documents: what it names exists, and no heading is missing."""

import re
from pathlib import Path

import pytest
from test_docs import ROOT, check_command, commands, inline_code, is_setting

TEXT = Path(__file__).with_name('DOCUMENTS.md').read_text(encoding='utf-8')
REFERENCE = ROOT.parent / 'shared' / 'reference'
NO_FEATURE = 'Headings without a feature of their own: '
OTHERS = ('nvidia-smi', 'tail', 'tensorboard')  # programs that are not ours


def exists(name, run):
    """Return whether a command, a file or a setting exists. run: the folder of a run."""
    found = list(commands(name))
    if found:
        try:
            check_command(*found)
        except (ValueError, OSError):
            return False
        return True
    if name.startswith('out_dir/'):
        return (run / name.removeprefix('out_dir/')).exists()
    if re.search(r'\.(py|md|txt)$', name):
        return (ROOT / name).is_file()
    return name.split()[0] in OTHERS or is_setting(name)


def test_all_that_it_names_exists(train_tiny, tmp_path, monkeypatch):
    train_tiny()
    monkeypatch.chdir(ROOT)
    assert [name for name in inline_code(TEXT) if not exists(name, tmp_path / 'out')] == []


def plain(heading):
    """Remove marks, number and pictures, which some documents have in a broken encoding."""
    text = re.sub(r'[^\x20-\x7e]+', ' ', heading).replace('**', '')
    return ' '.join(re.sub(r'^#+\s*(\d+\.\s)?', '', text).split()).rstrip(':')


@pytest.mark.skipif(not REFERENCE.is_dir(), reason='the reference documents are not here')
@pytest.mark.parametrize('path', sorted(REFERENCE.glob('*.txt')), ids=lambda path: path.name[:3])
def test_no_heading_of_a_document_is_left_out(path):
    section = TEXT.split(f'\n## {path.name[:3]}: ')[1].split('\n## ')[0].splitlines()
    known = [line.strip('|').split('|')[0].strip() for line in section if line.startswith('|')]
    for line in section:
        if line.startswith(NO_FEATURE):
            known += line.removeprefix(NO_FEATURE).rstrip('.').split('; ')
    outside = re.sub(r'^```.*?^```', '', path.read_text(encoding='utf-8'), flags=re.M | re.S)
    _, *headings = [plain(line) for line in outside.splitlines() if line.startswith('#')]
    assert [heading for heading in headings if heading not in known] == []
