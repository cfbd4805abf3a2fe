"""What runs leave behind: metrics, run directories, pictures, traces, tables and reports. Imports only
`policies.core` of ours."""
