"""Makes the tables of this folder with pyarrow: eight rows, one file for each compression.

What pyarrow calls "lz4" is LZ4_RAW of the format. The older kind, with Hadoop's frames around the blocks, pyarrow
reads but does not write: the test makes one.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

here = Path(__file__).parent
texts = [f"row {row}: " + "word " * (3 * row) for row in range(8)]
table = pa.table({"text": pa.array(texts), "number": pa.array(range(8), pa.int32())})
for name in ["gzip", "brotli", "lz4", "snappy", "zstd", "none"]:
    options = {"compression": name, "use_dictionary": False, "store_schema": False}
    pq.write_table(table, here / f"{name}.parquet", write_statistics=False, **options)
