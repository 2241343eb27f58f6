"""Pages that a browser shows without a network: one HTML file that holds everything."""
