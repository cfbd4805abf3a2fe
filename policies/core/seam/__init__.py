"""What passes between scheduler, policies and backends: values, and the contracts of both sides."""
