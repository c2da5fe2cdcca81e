"""The face: command line, progress and reports. The only code that prints."""
