"""The command line, a file for the commands of each part."""
