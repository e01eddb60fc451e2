"""What is done with stored triples: their export into files of graph programs, and one name per entity."""
