"""The command line and the HTML page."""
