"""Learn a byte-level byte-pair encoding (BPE, arXiv 1508.07909)."""

import heapq
from collections import Counter, defaultdict
from itertools import pairwise

# Merges never cross the words of this pattern, GPT-2's (https://github.com/openai/tiktoken).
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BYTES_IN_GPT2S_ORDER = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES_IN_GPT2S_ORDER += [b for b in range(256) if b not in BYTES_IN_GPT2S_ORDER]
# byte-level BPE writes each byte as a printable letter
BYTE_OF = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(BYTES_IN_GPT2S_ORDER)}
MAX_WORDS = 400_000  # distinct words to learn from; each takes about a kilobyte


def learn_merges(word_counts, num_tokens):
    """
    Train a BPE on {word: count}. Returns at most num_tokens tokens, as bytes, in order of rank: the
    256 bytes, then one per merge of the most frequent pair. Ties go to the smallest ranks, as in
    Hugging Face.
    """
    tokens = [bytes([b]) for b in BYTES_IN_GPT2S_ORDER]
    rank = {token: i for i, token in enumerate(tokens)}
    words = []
    for word in word_counts:
        words.append([rank[bytes([b])] for b in word.encode('utf-8', 'surrogatepass')])
    counts = list(word_counts.values())
    pairs = Counter()  # pair -> its count
    words_with = defaultdict(set)  # pair -> the indices of words that contain it
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[i]
            words_with[pair].add(i)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < num_tokens:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:  # outdated: later merges used up some of its occurrences
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        merged = tokens[pair[0]] + tokens[pair[1]]
        new = rank.setdefault(merged, len(tokens))  # two merges can give the same token
        if new == len(tokens):
            tokens.append(merged)
        change = Counter()
        for i in words_with.pop(pair):
            words[i], added = merge(words[i], pair, new, counts[i], change)
            for p in added:
                words_with[p].add(i)
        for p, difference in change.items():
            pairs[p] += difference
            if difference > 0:
                heapq.heappush(heap, (-pairs[p], p))
    return tokens


def count_words(texts):
    """Count the MAX_WORDS most frequent words. Words are cut to 1,000 characters."""
    import regex  # a dependency of tiktoken
    split = regex.compile(GPT2_SPLIT)
    counts = Counter()
    for text in texts:
        counts.update(word[:1000] for word in split.findall(text))
        if len(counts) > 4 * MAX_WORDS:
            counts = Counter(dict(counts.most_common(2 * MAX_WORDS)))
    return dict(counts.most_common(MAX_WORDS))


def merge(word, pair, new, count, change):
    """
    Replace each occurrence of the pair in a word, from the left, by the token `new`. Adds the changes of
    the counts of pairs to `change`, only where the word changes: in Chinese a word is a clause. Returns
    the word and its new pairs, of which some may be gone again.
    """
    first, second = pair
    merged = []
    added = set()
    done = 0  # tokens that are copied or replaced
    for i, token in enumerate(word):
        if token != second or i <= done or word[i - 1] != first:
            continue
        merged += word[done:i - 1]
        done = i + 1
        change[pair] -= count
        if merged:
            change[merged[-1], first] -= count
            change[merged[-1], new] += count
            added.add((merged[-1], new))
        if done < len(word):
            change[second, word[done]] -= count
            change[new, word[done]] += count
            added.add((new, word[done]))
        merged.append(new)
    return merged + word[done:], added
