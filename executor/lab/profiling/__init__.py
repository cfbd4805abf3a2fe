"""`executor profile`: times what batches are made of, on the path that runs take. The file format is
`results.profile`'s."""
