"""What is on disk and in configs: manifest, index, plan, commit records, draft config, options, and the error tree."""
