"""Learning a byte-level BPE (arXiv 1508.07909)."""

import heapq
from collections import Counter, defaultdict
from itertools import pairwise

# how text falls into words, within which pairs are merged: GPT-2's rule (https://github.com/openai/tiktoken)
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BYTES_IN_GPT2S_ORDER = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES_IN_GPT2S_ORDER += [b for b in range(256) if b not in BYTES_IN_GPT2S_ORDER]


def train_bpe(texts, num_tokens):
    """
    The tokens, in order of rank, of a byte-level BPE (arXiv 1508.07909): 256 bytes, then merges of the most frequent
    pair within words, or of several such the pair of the smallest ranks, as Hugging Face's tokenizers have it; up to
    num_tokens in all. Words are counted once, the rarest of more than MAX_WORDS left out, and a merge visits only the
    words that hold its pair.
    """
    tokens = [bytes([b]) for b in BYTES_IN_GPT2S_ORDER]
    rank = {token: i for i, token in enumerate(tokens)}
    counts = count_words(texts)
    words = [[rank[bytes([b])] for b in word.encode('utf-8', 'surrogatepass')] for word in counts]
    times = list(counts.values())
    pairs, holders = Counter(), defaultdict(set)  # how often a pair occurs, and in which words
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += times[i]
            holders[pair].add(i)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < num_tokens:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:  # merges since then have used some of them up
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        merged = tokens[pair[0]] + tokens[pair[1]]
        new = rank.setdefault(merged, len(tokens))
        if new == len(tokens):
            tokens.append(merged)
        change = Counter()
        for i in holders.pop(pair):
            change.update({p: -n * times[i] for p, n in Counter(pairwise(words[i])).items()})
            words[i] = merge(words[i], pair, new)
            for p in pairwise(words[i]):
                change[p] += times[i]
                if new in p:
                    holders[p].add(i)
        for p, difference in change.items():
            pairs[p] += difference
            if difference > 0:
                heapq.heappush(heap, (-pairs[p], p))
    return tokens


MAX_WORDS = 400_000  # different words that merges are learned from; each costs about a kilobyte


def count_words(texts):
    """How often each word occurs, of the MAX_WORDS most frequent; long runs that no space breaks are cut."""
    import regex  # tiktoken needs it too
    split, counts = regex.compile(GPT2_SPLIT), Counter()
    for text in texts:
        counts.update(word[:1000] for word in split.findall(text))
        if len(counts) > 4 * MAX_WORDS:
            counts = Counter(dict(counts.most_common(2 * MAX_WORDS)))
    return counts if len(counts) <= MAX_WORDS else Counter(dict(counts.most_common(MAX_WORDS)))


def merge(word, pair, new):
    """The word with every occurrence of the pair, from the left, as one token."""
    out, i = [], 0
    while i < len(word):
        if word[i] == pair[0] and i + 1 < len(word) and word[i + 1] == pair[1]:
            out.append(new)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out
