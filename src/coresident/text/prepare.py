"""Makes a token cache from a corpus: all of it or nothing, and the same bytes whatever the number of workers.

It is written to `OUT.partial`, brought to disk, and only then renamed to `OUT`: an interrupted `prepare` leaves nothing that
looks done, and the next one begins anew.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import Field

from coresident import whole
from coresident.errors import MachineError, UserError
from coresident.text import corpus, manifest, vocabulary
from coresident.text.cache import Split, TokenCache
from coresident.text.corpus import CorpusSource
from coresident.text.manifest import FamilySplit, Manifest, Shard
from coresident.text.shards import SHARD_TOKENS, ShardWriter
from coresident.text.tokenizer import SMALLEST
from coresident.text.vocabulary import LARGEST, Vocabulary
from coresident.text.workers import tokenized
from coresident.workload import Parameters

# done, total (0: not known), unit: as `Reporter.progress` takes it.
Progress = Callable[[float, float, str], None]
SPLITS: tuple[Split, ...] = ("train", "validation")
# Suffixes that are named of what is left out: a line's worth.
_NAMED = 8


class Prepare(Parameters):
    """What a token cache is made from. The defaults make the small one of the smoke preset from Python's own library.

    `tokenizer` is a Hugging Face directory; without one a byte-level BPE of at most `vocabulary` tokens is trained on the
    training documents, up to `tokenizer_bytes` of each family.
    """

    source: CorpusSource = CorpusSource()
    tokenizer: str | None = None
    vocabulary: Annotated[int, Field(ge=SMALLEST, le=LARGEST)] = 2048
    tokenizer_bytes: Annotated[int, Field(ge=1)] = 1 << 24
    shard_tokens: Annotated[int, Field(ge=1)] = SHARD_TOKENS


def prepare(
    settings: Prepare,
    out: Path,
    workers: int = 1,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> TokenCache:
    """Make the cache `out` and open it. `workers` processes tokenize; they change nothing but the time it takes. `say` hears
    it if an earlier one did not end, if files are left out, and if the text gives a smaller vocabulary than was asked for.

    Raises UserError for text that is none and for an `out` that exists, MachineError where the disk is full or another
    `prepare` is writing there. Call it from a program's main module guarded by `__name__ == "__main__"`: workers are spawned.
    """
    if workers < 1:
        raise UserError(f"{workers} workers cannot tokenize", "ask for at least one (--workers 1)")
    out = out.absolute()
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.with_name(f".{out.name}.lock")
        # FileLock takes a file that cannot be made for one that is held.
        lock.touch()
        with FileLock(lock, timeout=0):
            if out.exists() and not (out.is_dir() and not any(out.iterdir())):
                raise UserError(f"{out} is already there", "give another --out, or remove it first")
            # Whoever holds the lock is the only writer: what lies there was left by one that was killed.
            if partial.exists():
                say(f"an earlier prepare of {out} did not end: beginning anew")
                shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                _fill(settings, partial, workers, progress, say)
                partial.rename(out)
                whole.sync(out.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except Timeout:
        raise MachineError(
            f"another prepare is writing {out}", "wait for it, or give another --out"
        ) from None
    except OSError as error:
        raise _disk(error, out) from error
    return TokenCache.open(out)


def _fill(
    settings: Prepare, into: Path, workers: int, progress: Progress, say: Callable[[str], None]
) -> None:
    _say_left_out(settings.source, say)
    own = _tokenizer(settings, into / manifest.TOKENIZER)
    if settings.tokenizer is None and own.size < settings.vocabulary:
        say(
            f"the vocabulary has {own.size:,} tokens, not {settings.vocabulary:,}:"
            f" there is no more to merge in the text (tokenizer_bytes: {settings.tokenizer_bytes:,} a family)"
        )
    families = corpus.families(settings.source)
    streams: list[tuple[Split, str]] = [(split, family) for split in SPLITS for family in families]
    writers = {key: ShardWriter(into, "-".join(key), settings.shard_tokens) for key in streams}
    documents = dict.fromkeys(streams, 0)
    done, limit = 0, (settings.source.limit or 0) * len(families)
    try:
        with closing(tokenized(corpus.documents(settings.source), own, workers)) as pieces:
            for piece in pieces:
                for split, part in zip(SPLITS, (piece.train, piece.validation), strict=True):
                    writers[split, piece.family].write(part.tokens)
                    documents[split, piece.family] += part.documents
                    done += part.text_bytes
                progress(done, max(done, limit) if limit else 0, "bytes of text")
        parts = [_described(key, documents[key], writers[key].close()) for key in streams]
    finally:
        for writer in writers.values():
            writer.abandon()
    _some_of_each(parts, settings.source)
    made = Manifest(
        vocabulary=own.size,
        end=own.end,
        tokenizer=_checksums(into / manifest.TOKENIZER),
        streams=tuple(parts),
    )
    with (into / manifest.FILE).open("wb") as stream:
        stream.write(manifest.render(made))
        stream.flush()
        os.fsync(stream.fileno())
    whole.sync(into)


def _say_left_out(source: CorpusSource, say: Callable[[str], None]) -> None:
    counts = sum(map(Counter, corpus.left_out(source).values()), Counter[str]())
    if not counts:
        return
    total, named = counts.total(), counts.most_common(_NAMED)
    told = [f"{suffix} {count:,}" for suffix, count in named]
    if others := total - sum(count for _, count in named):
        told.append(f"others {others:,}")
    files = "1 file" if total == 1 else f"{total:,} files"
    say(f"left out: {files} of kinds that are not read ({', '.join(told)})")


def _tokenizer(settings: Prepare, into: Path) -> Vocabulary:
    if settings.tokenizer is not None:
        return vocabulary.adopt(Path(settings.tokenizer).expanduser(), into)
    return vocabulary.train(_sample(settings.source, settings.tokenizer_bytes), settings.vocabulary, into)


def _sample(source: CorpusSource, limit: int) -> Iterator[str]:
    """Training texts for a tokenizer, up to a limit of bytes in each family: what is held out stays unseen."""
    for family in corpus.families(source):
        size = 0
        for document in corpus.documents(source, family):
            if not document.validation:
                yield document.text
                size += len(document.text.encode())
            if size >= limit:
                break


def _described(key: tuple[Split, str], documents: int, shards: tuple[Shard, ...]) -> FamilySplit:
    split, family = key
    tokens = sum(shard.tokens for shard in shards)
    return FamilySplit(split=split, family=family, documents=documents, tokens=tokens, shards=shards)


def _some_of_each(parts: Sequence[FamilySplit], source: CorpusSource) -> None:
    """A split that should have tokens and has none is an error now, not at the end of a training."""
    for split in SPLITS:
        wanted = split == "train" or source.validation_share > 0 or bool(source.validation)
        if wanted and not any(part.tokens for part in parts if part.split == split):
            raise UserError(
                f"source: none of {sum(part.documents for part in parts)} documents fell to {split}",
                "give source.validation files, another source.validation_share (0: none is held out), or a"
                " source.separator that divides text files into documents",
            )


def _checksums(directory: Path) -> dict[str, str]:
    """Each of the directory's files with its SHA-256, all of them brought to disk."""
    found = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
    whole.sync(directory)
    return found


def _disk(error: OSError, out: Path) -> MachineError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"{out} cannot be written: {reason}", "free some space, set source.limit, or give another --out"
        )
    return MachineError(f"{out} cannot be written: {reason}", "give a directory that you may write to")
