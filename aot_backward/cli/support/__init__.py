"""What several commands share: how errors are reported, options, progress, tables, running a script."""
