"""files.py and host.py: files replaced at once, locked, read; CPUs and memory as a container has them."""

import contextlib
import errno
import os
import stat
from unittest.mock import Mock

import pytest
from conftest import contents, error_of

from hotloop.system.files import lock, read_json, replacing
from hotloop.system.host import cores, memory, threads_for


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


@pytest.mark.parametrize('number, is_known', [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_file_systems_that_cannot_lock(tmp_path, monkeypatch, number, is_known):
    """NFS without a lock service, some FUSE mounts."""
    monkeypatch.setattr('fcntl.flock', Mock(side_effect=OSError(number, os.strerror(number))))
    with contextlib.nullcontext() if is_known else pytest.raises(OSError, match='error'):
        lock(str(tmp_path / 'lock')).close()


def test_a_file_and_its_folder_reach_the_disk(tmp_path, monkeypatch):
    """The shared folders of VirtualBox and some network drives cannot be synced."""
    synced = []

    def fsync(descriptor, sync=os.fsync):
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / 'a').exists()))
        if synced[-1][0]:
            raise OSError(errno.EINVAL, 'Invalid argument')
        sync(descriptor)
    monkeypatch.setattr(os, 'fsync', fsync)
    with replacing(str(tmp_path / 'a')) as f:
        f.write(b'new')
    assert contents(tmp_path) == {'a': b'new'}
    assert synced == [(False, False), (True, True)]  # the file before its rename, the folder after it


def test_json_that_is_not_an_object_is_refused(tmp_path):
    for raw in (b'', b'{"a": 1', b'\xff{}'):
        (tmp_path / 'a.json').write_bytes(raw)
        assert 'a.json cannot be read: ' in error_of(read_json, str(tmp_path / 'a.json'))
    (tmp_path / 'a.json').write_bytes(b'[1]')
    assert 'a.json does not hold a JSON object' in error_of(read_json, str(tmp_path / 'a.json'))


def limit(root, groups, **files):
    """Write the files of a machine whose process is in these control groups, with limits."""
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
                                     ('1000 100000', 1, 1)):
        limit(tmp_path, '0::/', **{'sys/fs/cgroup/cpu.max': quota})
        assert (cores(root=tmp_path), cores(physical=True, root=tmp_path)) == (logical, physical)


@pytest.mark.parametrize('group, folder', [
    ('0::/', '.'),  # a container
    ('0::/system.slice/job_7/step_0', 'system.slice/job_7')])  # a job of Slurm
def test_limits_of_control_groups(tmp_path, monkeypatch, group, folder):
    """Each of the groups around a process limits it."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(6)), raising=False)
    assert (cores(root=tmp_path), memory(tmp_path)) == (6, memory(tmp_path / 'nowhere'))
    base = f'sys/fs/cgroup/{folder}'
    limit(tmp_path, group, **{f'{base}/cpu.max': '250000 100000', f'{base}/memory.max': '1000000',
                              f'{base}/step_0/cpu.max': 'max 100000', f'{base}/step_0/memory.max': 'max'})
    assert (cores(root=tmp_path), memory(tmp_path)) == (3, 10**6)


def test_threads_are_those_of_omp_num_threads_or_a_share_of_the_cores(monkeypatch):
    """torchrun sets OMP_NUM_THREADS=1 for several processes if the user has not set it."""
    monkeypatch.setattr('hotloop.system.host.cores', lambda physical: 8)
    for asked, alone, of_four in ((None, 8, 2), ('1', 1, 2), ('3', 3, 3), ('', 8, 2),
                                  ('x', 8, 2), ('0', 8, 2)):
        monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
        if asked is not None:
            monkeypatch.setenv('OMP_NUM_THREADS', asked)
        assert (threads_for(1), threads_for(4)) == (alone, of_four), asked
    assert threads_for(16) == 1
