"""Results of runs and how people see them: JSON, terminal, one HTML file, plots, traces."""
