"""files.py and host.py: files replaced at once, locked, read; CPUs and memory as a container has them."""

import contextlib
import errno
import os
import signal
import stat
from unittest.mock import Mock

import pytest
from conftest import contents, error_of

from hotloop.system.files import (
    Progress,
    counted,
    first_line,
    hash_file,
    is_inside,
    lock,
    optional,
    read_json,
    replacing,
)
from hotloop.system.host import cores, memory, peak_memory, threads_for


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes(b'old')
    with pytest.raises(KeyboardInterrupt), replacing(str(path)) as f:
        f.write(b'half of the new')
        f.flush()
        assert path.read_bytes() == b'old'
        raise KeyboardInterrupt
    assert contents(tmp_path) == {'a.txt': b'old'}
    with replacing(str(path)) as f:
        f.write(b'new')
    assert contents(tmp_path) == {'a.txt': b'new'}


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_lock_names_its_owner_and_ends_with_a_killed_process(tmp_path):
    path = str(tmp_path / 'lock')
    held = lock(path)
    assert error_of(lock, path) == f'{tmp_path} is in use by process {os.getpid()}'
    held.release()
    child = os.fork()
    if child == 0:
        lock(path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / 'lock.pid').read_text() == str(child)
    lock(path).release()


def test_without_kernel_locks_there_is_none(tmp_path, monkeypatch):
    """A lock file instead would outlive a kill -9."""
    def flock(*args):
        raise OSError(errno.ENOSYS, 'Function not implemented')
    monkeypatch.setattr(pytest.importorskip('fcntl'), 'flock', flock)
    with pytest.warns(UserWarning, match='flock not supported'):
        assert lock(str(tmp_path / 'lock')) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(('error', 'is_known'), [
    (OSError(errno.ENOLCK, 'No locks available'), True), (OSError(errno.ENOTSUP, 'Not supported'), True),
    (OSError(errno.EIO, 'Input/output error'), False)])
def test_file_systems_that_cannot_lock(tmp_path, monkeypatch, error, is_known):
    """NFS without a lock service, some FUSE mounts."""
    monkeypatch.setattr(pytest.importorskip('fcntl'), 'flock', Mock(side_effect=error))
    with contextlib.nullcontext() if is_known else pytest.raises(OSError, match='Input/output error'):
        assert lock(str(tmp_path / 'lock')) is None


@pytest.mark.parametrize('number', [errno.EINVAL, errno.EIO])
def test_folders_that_cannot_be_synced(tmp_path, monkeypatch, number):
    """The shared folders of VirtualBox, some network drives."""
    def fsync(descriptor, sync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)
    monkeypatch.setattr(os, 'fsync', fsync)
    refused = pytest.raises(OSError, match='error') if number == errno.EIO else contextlib.nullcontext()
    with refused, replacing(str(tmp_path / 'a')) as f:
        f.write(b'new')
    assert contents(tmp_path) == {'a': b'new'}


def test_json_that_is_not_an_object_is_refused(tmp_path):
    for raw in (b'', b'{"a": 1', b'\xff{}', b'[' * 100_000):
        (tmp_path / 'a.json').write_bytes(raw)
        assert 'a.json cannot be read: ' in error_of(read_json, str(tmp_path / 'a.json'))
    (tmp_path / 'a.json').write_bytes(b'[1]')
    assert 'a.json does not hold a JSON object' in error_of(read_json, str(tmp_path / 'a.json'))


def test_small_helpers(tmp_path, capsys):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'f').write_bytes(b'abc')
    assert hash_file(tmp_path / 'f').startswith('ba7816bf')
    assert is_inside(tmp_path / 'a' / '..' / 'a' / 'f', tmp_path / 'a') and is_inside(tmp_path, tmp_path)
    assert not is_inside(tmp_path / 'ab', tmp_path / 'a')
    assert first_line(ValueError('\none\ntwo')) == 'one'
    assert [counted(1, 'step'), counted(1200, 'step'), counted(0, 'process'), counted(2, 'micro-batch')] == [
        '1 step', '1,200 steps', '0 processes', '2 micro-batches']
    assert error_of(optional, 'nothing.part', 'reads dreams') == 'nothing reads dreams: pip install nothing'
    for total, done, words in ((100e6, 0, '50 MB of 100 MB, 5 MB/s, 10 s left'), (0, 0, '50 MB, 5 MB/s'),
                               (100e6, 30e6, '80 MB of 100 MB, 5 MB/s, 4 s left')):
        progress = Progress(total, done)
        progress.start -= 10
        progress.add(0)
        progress.add(50e6)
        progress.close()
        assert capsys.readouterr().err == f'\r{words}   \n'


def limit(root, groups, **files):
    """Makes a machine whose process is in control groups, as /proc/self/cgroup lists them, with limits."""
    for name, text in {'proc/self/cgroup': groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + '\n')


def test_cores_are_those_of_the_affinity_mask_and_of_a_quota(tmp_path, monkeypatch):
    """Six CPUs: 0 and 4 share a core, 1 and 5 share one; the system says nothing about CPU 3."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(6)), raising=False)
    for cpu, siblings in {0: '0,4', 1: '1,5', 2: '2', 4: '0,4', 5: '1,5'}.items():
        folder = f'sys/devices/system/cpu/cpu{cpu}/topology'
        limit(tmp_path, '0::/', **{f'{folder}/thread_siblings_list': siblings})
    for quota, logical, physical in (('', 6, 4), ('max 100000', 6, 4), ('250000 100000', 3, 3),
                                     ('1000 100000', 1, 1), ('nonsense', 6, 4)):
        limit(tmp_path, '0::/', **{'sys/fs/cgroup/cpu.max': quota})
        assert (cores(root=tmp_path), cores(physical=True, root=tmp_path)) == (logical, physical)


@pytest.mark.parametrize(('groups', 'folder', 'version'), [
    ('0::/', '.', 2),  # a container
    ('0::/system.slice/job_7/step_0', 'system.slice/job_7', 2),  # a job of Slurm
    ('2:cpu,cpuacct:/docker/1\n1:memory:/docker/1', '.', 1),  # a container
    ('2:cpu,cpuacct:/job_7/step_0\n1:memory:/job_7/step_0\n0::/', 'job_7', 1),
])
def test_limits_of_control_groups(tmp_path, monkeypatch, groups, folder, version):
    """Each of the groups around a process limits it. Version 1 has a tree for each resource."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(6)), raising=False)
    base = 'sys/fs/cgroup'
    assert (cores(root=tmp_path), memory(tmp_path)) == (6, memory(tmp_path / 'nowhere'))
    if version == 1:
        limits = {f'{base}/cpu/{folder}/cpu.cfs_quota_us': '250000',
                  f'{base}/cpu/{folder}/cpu.cfs_period_us': '100000',
                  f'{base}/cpu/{folder}/step_0/cpu.cfs_quota_us': '-1',
                  f'{base}/memory/{folder}/memory.limit_in_bytes': '1000000',
                  f'{base}/memory/{folder}/step_0/memory.limit_in_bytes': str(2**63 - 4096)}
    else:
        limits = {f'{base}/{folder}/cpu.max': '250000 100000', f'{base}/{folder}/memory.max': '1000000',
                  f'{base}/{folder}/step_0/cpu.max': 'max 100000',
                  f'{base}/{folder}/step_0/memory.max': 'max'}
    limit(tmp_path, groups, **limits)
    assert (cores(root=tmp_path), memory(tmp_path)) == (3, 10**6)


def test_threads_are_those_of_omp_num_threads_or_a_share_of_the_cores(monkeypatch):
    """torchrun sets OMP_NUM_THREADS=1 for several processes if the user has not set it."""
    monkeypatch.setattr('hotloop.system.host.cores', lambda physical: 8)
    for asked, alone, of_four in ((None, 8, 2), ('1', 1, 2), ('3', 3, 3), ('6,2', 6, 6), ('', 8, 2),
                                  ('x', 8, 2), ('0', 8, 2)):
        monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
        if asked is not None:
            monkeypatch.setenv('OMP_NUM_THREADS', asked)
        assert (threads_for(1), threads_for(4)) == (alone, of_four), asked
    assert threads_for(16) == 1


def test_peak_memory():
    assert 10**6 < peak_memory() < 10**12
