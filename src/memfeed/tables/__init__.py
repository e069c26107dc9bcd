"""Data frames, Arrow tables, Parquet files and HDF5 files as columns, read in chunks."""
