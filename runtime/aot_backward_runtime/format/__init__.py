"""The package format, as bytes and as typed records: read and written without torch."""
