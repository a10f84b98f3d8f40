"""What several commands share: how errors are told, options, progress, tables, running a script."""
