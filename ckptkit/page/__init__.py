"""A step as one HTML file: what is in it, gathered as columns, and the page that draws them."""
