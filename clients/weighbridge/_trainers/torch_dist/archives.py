"""Archives that ``torch.save`` writes: ZIP files with uncompressed records.

An archive is a file or a part of a larger file.

Sources: torch/serialization.py and caffe2/serialize/inline_container.cc of torch 2.13; APPNOTE.TXT of PKWARE for ZIP,
ZIP64 in its section 4.3.14.
"""

from __future__ import annotations

import os
import struct

from weighbridge.errors import DataLoss

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
FULL = 0xFFFFFFFF


class Archive:
    """An archive of ``torch.save`` inside an open file.

    Args:
        fd: the open file.
        offset: first byte of the archive in the file.
        length: number of bytes of the archive; the caller has checked that the file is long enough.
        max_directory: maximum number of bytes of the archive's directory.

    Raises:
        DataLoss: the bytes are not such an archive.
    """

    def __init__(self, fd: int, offset: int, length: int, max_directory: int) -> None:
        self._fd = fd
        self._offset = offset
        self.length = length
        self._records = _read_directory(self, max_directory)
        first = next(iter(self._records))
        self._prefix = first[: first.find(b"/") + 1]

    def pickle(self, most: int) -> bytes:
        """Return the pickle of the saved value.

        Tensors in it refer to storages, whose bytes are in little-endian order.

        Raises:
            DataLoss: the pickle has more than ``most`` bytes, or the byte order is not little-endian.
        """
        begin, end = self.record(b"data.pkl")
        if end - begin > most:
            raise DataLoss(f"its pickle has {end - begin} bytes, more than {most}")
        if self._prefix + b"byteorder" in self._records:
            order = self.read(*self.record(b"byteorder"))
            if order != b"little":
                raise DataLoss(f"its byte order is {order[:20]!r}, not little-endian")
        return self.read(begin, end)

    def record(self, name: bytes) -> tuple[int, int]:
        """Return begin and end of a record's content in the archive.

        Raises DataLoss if the record does not exist or is compressed.
        """
        name = self._prefix + name
        if name not in self._records:
            raise DataLoss(f"its archive has no record {name[:80]!r}")
        method, size, header, limit = self._records[name]
        if method:
            raise DataLoss(f"the record {name[:80]!r} of its archive is compressed")
        local = LOCAL.unpack(self.read(header, header + LOCAL.size))
        begin = header + LOCAL.size + local[9] + local[10]
        found = self.read(header + LOCAL.size, header + LOCAL.size + local[9])
        if local[0] != b"PK\x03\x04" or local[3] != 0 or found != name or begin + size > limit:
            raise DataLoss(f"the record {name[:80]!r} of its archive is not where the directory says")
        return begin, begin + size

    def read(self, begin: int, end: int) -> bytes:
        """Read the bytes ``begin`` to ``end``."""
        if not 0 <= begin <= end <= self.length:
            raise DataLoss(f"its archive refers to the bytes {begin} to {end} of {self.length}")
        data = os.pread(self._fd, end - begin, self._offset + begin)
        if len(data) != end - begin:
            raise DataLoss("the file ends inside it")
        return data


def _read_directory(archive: Archive, most: int) -> dict[bytes, tuple[int, int, int, int]]:
    """Return the records of an archive: name to (compression method, stored size, local header, end of all records)."""
    length = archive.length
    if length < END.size:
        raise DataLoss(f"{length} bytes are too few for an archive of torch.save")
    end = length - END.size
    magic, _, _, _, count, size, start, comment = END.unpack(archive.read(end, length))
    if magic != b"PK\x05\x06" or comment:
        raise DataLoss("it does not end as an archive of torch.save does: cut short, or of another format")
    if FULL in (size, start) or count == 0xFFFF:
        magic, _, end64, _ = LOCATOR.unpack(archive.read(end - LOCATOR.size, end))
        if magic != b"PK\x06\x07":
            raise DataLoss("its archive has no ZIP64 locator")
        fields = END64.unpack(archive.read(end64, end64 + END64.size))
        if fields[0] != b"PK\x06\x06":
            raise DataLoss("its archive has no ZIP64 directory")
        count, size, start = fields[7:]
    if size > most or start + size > end:
        raise DataLoss(f"its archive has a directory of {size} bytes at {start}, in {length} bytes")
    data = archive.read(start, start + size)
    records: dict[bytes, tuple[int, int, int, int]] = {}
    position = 0
    while position < size:
        if position + CENTRAL.size > size:
            raise DataLoss("the directory of its archive is cut short")
        entry = CENTRAL.unpack_from(data, position)
        flags, method, packed, plain, name_length, extra_length = (entry[i] for i in (3, 4, 8, 9, 10, 11))
        header = entry[16]
        position += CENTRAL.size
        name = data[position : position + name_length]
        if FULL in (packed, plain, header):
            extra = data[position + name_length : position + name_length + extra_length]
            plain, packed, header = _wide_fields(extra, plain, packed, header)
        position += name_length + extra_length + entry[12]
        if (
            entry[0] != b"PK\x01\x02"
            or position > size
            or name in records
            or flags & 1
            or (not method and packed != plain)
        ):
            raise DataLoss("the directory of its archive is damaged")
        records[name] = (method, plain, header, start)
    if len(records) != count or not records:
        raise DataLoss(f"its archive has {len(records)} records, but declares {count}")
    return records


def _wide_fields(extra: bytes, *narrow: int) -> list[int]:
    """Return the fields of a directory entry.

    Fields whose bits are all ones are replaced by those in its ZIP64 extra field.
    """
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, position)
        position += 4
        if tag == 1 and size >= 8 * narrow.count(FULL) and position + size <= len(extra):
            wide = iter(struct.unpack_from(f"<{narrow.count(FULL)}Q", extra, position))
            return [next(wide) if value == FULL else value for value in narrow]
        position += size
    raise DataLoss("its archive has a record of more than 4 GiB without a ZIP64 field")
